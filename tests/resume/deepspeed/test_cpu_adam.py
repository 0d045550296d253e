"""DeepSpeed's CPUAdam keeps state of its own, in C++, that no checkpoint holds."""

from __future__ import annotations

import pytest

from resume import symptoms
from resume.deepspeed import cpu_adam
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import Story, cells

# the first step at which 0.999 to its power rounds otherwise than the last power times 0.999, in fp32, is the third
STEPS = 2


@pytest.fixture(scope="module", autouse=True)
def compiled():
    cpu_adam.compiled()


def ids(some: list[Cell]) -> list:
    return [pytest.param(cell, id=cell.id) for cell in some]


CELLS = cells(("fp32", "bf16"), (1, 2, 3), (1,), optimizer="cpuadam") + cells(("fp16",), (2,), optimizer="cpuadam")


@pytest.mark.fault("cpuadam-bias-correction", symptom=symptoms.Diverged)
@pytest.mark.parametrize("cell", ids(CELLS))
def test_training_goes_on_bit_for_bit(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save(steps=STEPS)
    story.check_full(story.resume(start=STEPS))
