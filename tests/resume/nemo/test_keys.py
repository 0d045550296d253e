"""Under which key a gated layer's fp32 params are saved, and that checkpoints with either key load."""

from __future__ import annotations

import pytest

from resume.nemo.engines import Cell
from resume.nemo.story import Story
from resume.symptoms import crash

OLD = "optimizer.state.param."


@pytest.mark.fault("dist-key-compat", symptom=crash("CheckpointException", OLD))
@pytest.mark.parametrize("masters", ("params", "remainders"))
@pytest.mark.parametrize("model, world", [("moe", 1), ("moe", 2), ("swiglu", 1)])
def test_both_spellings_load_and_one_is_saved(pools, tmp_path, model, world, masters):
    cell = Cell(model, "distributed", masters, world=world)
    for spelling in ("fp32_param", "param"):
        story = Story(pools, cell, tmp_path / spelling).train_and_save(spelling=spelling)
        found = pools(1).run("resume.nemo.runs:keys", folder=story.folder)[0]
        assert any(key.startswith(OLD) for key in found) == (spelling == "param")
        story.check(cell)
        saved = pools(1).run("resume.nemo.runs:keys", folder=story.again)[0]
        assert not [key for key in saved if key.startswith(OLD)]


@pytest.mark.guard
@pytest.mark.parametrize("model", ("moe", "swiglu", "plain"))
def test_checkpoint_of_the_pristine_release_loads(pools, tmp_path, model):
    """What a pristine release writes: gated layers under the old key, all others under the new one."""
    cell = Cell(model, "distributed", world=2)
    story = Story(pools, cell, tmp_path).train_and_save(spelling="param")
    resumed = story.resume(cell)
    story.check_loaded(cell, resumed)
    story.check_final(cell, resumed)


@pytest.mark.guard
@pytest.mark.parametrize("model", ("moe", "swiglu", "plain"))
def test_fused_adam_resumes_itself(pools, tmp_path, model):
    cell = Cell(model, "fused", world=2)
    Story(pools, cell, tmp_path).train_and_save().check(cell)
