"""``load_module_only=True`` means the module only: no moments, no optimizer files, any world size."""

from __future__ import annotations

import pytest

from resume import symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import MODULE_ONLY, Story, cells, variant
from resume.deepspeed.test_fresh_optimizer import remove_optimizer_files
from resume.symptoms import crash

# where pristine 0.12.6 keeps optimizer state in files of their own: ZeRO, and BF16_Optimizer at stage 0
SEPARATE = [*cells(("bf16",), (0,)), *cells(stages=(1, 2, 3))]
OTHERS = [
    Cell("bf16", 1, 1, grad_accum="fp32"),
    Cell("bf16", 1, 2, grad_accum="fp32"),
    Cell("bf16", 1, 1, load_from_fp32=False),
    Cell("bf16", 3, 1, optimizer="fused"),
]


def ids(some) -> list:
    return [pytest.param(cell, id=cell.id) for cell in some]


@pytest.mark.fault("module-only-loads-moments", symptom=symptoms.MomentsNotFresh)
@pytest.mark.parametrize("cell", ids(SEPARATE + OTHERS))
def test_module_only_leaves_the_optimizer_fresh(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    resumed = story.resume(MODULE_ONLY)
    story.check_weights_only(resumed, counters=False)
    if cell.stage < 3:  # ZeRO-3 has its weights nowhere else
        story.check_no_optimizer_file(resumed)


@pytest.mark.guard
@pytest.mark.parametrize("cell", ids(cells(("fp16", "fp32"), (0,))))
def test_module_only_at_stage_0(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_weights_only(story.resume(MODULE_ONLY), counters=False)


@pytest.mark.fault("module-only-loads-moments", symptom=crash("FileNotFoundError", "optim_states.pt"))
@pytest.mark.parametrize("cell", ids([*cells(("bf16",), (0, 1, 2)), Cell("fp16", 1, 1), Cell("fp32", 2, 1)]))
def test_module_only_needs_no_optimizer_files(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    remove_optimizer_files(tmp_path)
    story.check_weights_only(story.resume(MODULE_ONLY), counters=False)


@pytest.mark.fault("module-only-loads-moments", symptom=crash("ZeRORuntimeException", "DP world size"))
@pytest.mark.parametrize("cell", ids(cells(("bf16",), (0, 1, 2, 3), (2,))))
def test_module_only_loads_on_fewer_ranks(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    fewer = Story(pools, variant(cell, world=1), tmp_path)
    fewer.check_weights_only(fewer.resume(MODULE_ONLY), counters=False, saved=story.saved[:1])
