"""Native full resume is bit-exact: what upstream gets right must stay right (guards, on every wheel)."""

import pytest

from resume.deepspeed.engines import Cell
from resume.deepspeed.story import Story, cells, loads, variant
from resume.symptoms import crash


@pytest.mark.guard
@pytest.mark.parametrize("cell", [pytest.param(c, id=c.id) for c in cells() if loads(c)])
def test_full_resume_is_exact(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume())


ON = {"options": ("elastic_checkpoint",)}
ELASTIC = [
    pytest.param(cell, id=cell.id) for cell in (Cell("bf16", 1, 2, **ON), Cell("fp16", 2, **ON), Cell("fp32", 1, **ON))
]


UNSAVED = crash("IndexError", "0-dim tensor")  # up to 0.17, where the checkpoint is saved


@pytest.mark.fault("elastic-step", symptom=(crash("AssertionError"), UNSAVED))
@pytest.mark.parametrize("cell", ELASTIC)
def test_elastic_checkpoint_resumes(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume())


@pytest.mark.fault("elastic-step", symptom=(crash("KeyError", "base_optimizer_state_step"), UNSAVED))
@pytest.mark.parametrize("cell", ELASTIC)
def test_elastic_checkpoint_resumes_without_the_option(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume(cell=variant(cell, options=())))
