"""Which of a checkpoint's param groups belongs to which of the optimizer's."""

from __future__ import annotations

import pytest

from resume import symptoms
from resume.nemo.engines import Cell
from resume.nemo.story import Story
from resume.symptoms import crash

NO_STEP = crash("KeyError", "step")
MISSING_KEY = crash("CheckpointException", "optimizer.state.param.")


@pytest.mark.fault("group-pairing", symptom=symptoms.GroupsNotRestored)
@pytest.mark.parametrize("groups, order", [(2, (1, 0)), (3, (2, 0, 1))])
def test_groups_in_another_order(pools, tmp_path, groups, order):
    story = Story(pools, Cell("plain", "distributed", groups=groups, order=order), tmp_path).train_and_save()
    story.check(Cell("plain", "distributed", groups=groups, decays=False))


@pytest.mark.fault("group-pairing", symptom=(symptoms.GroupsNotRestored, MISSING_KEY))
@pytest.mark.parametrize("masters", ("params", "remainders"))
def test_expert_parallel_two_saved_and_one_loaded(pools, tmp_path, masters):
    story = Story(pools, Cell("moe", "fused", world=2, ep=2), tmp_path).train_and_save()
    assert len({v for k, v in story.saved.groups.items() if k.endswith("is_expert")}) == 2
    story.check(Cell("moe", "distributed", masters, decays=False))


@pytest.mark.fault("group-pairing", symptom=NO_STEP)
@pytest.mark.parametrize("saved, loaded", [(3, 2), (2, 3)])
def test_refuses_groups_that_cannot_be_told_apart(pools, tmp_path, saved, loaded):
    """Embeddings with a learning rate of their own fit no group of a run without, and the reverse."""
    story = Story(pools, Cell("plain", "fused", world=2, groups=saved), tmp_path).train_and_save()
    target = Cell("plain", "distributed", world=2, groups=loaded, decays=False)
    found = pools(2).outcomes("resume.nemo.runs:resume", cell=target, folder=story.folder)
    for error in found:
        if not crash("ValueError", "Build the optimizer with the param groups of the saved run").matches(error):
            raise error
        assert "param_groups" in error.text and "weight" in error.text
