"""From fused_adam to distributed_fused_adam, and what param groups carry over."""

from __future__ import annotations

import pytest

from resume import symptoms
from resume.nemo.engines import Cell
from resume.nemo.story import Story
from resume.symptoms import crash

MISSING_KEY = crash("CheckpointException", "optimizer.state.param.")
NO_STEP = crash("KeyError", "step")


def pairs(model: str):
    """(source, target) of a model: worlds, numbers of groups, places of the masters.

    No hyperparameter of the target, in any group, is the source's, not even whether the group decays weights.
    """
    for saved, loaded in ((1, 1), (2, 2), (2, 1)):
        for groups in (2, 3):
            for masters in ("params", "remainders"):
                yield pytest.param(
                    Cell(model, "fused", world=saved, groups=groups),
                    Cell(model, "distributed", masters, world=loaded, groups=groups),
                    id=f"{model}-{saved}to{loaded}-{groups}groups-{masters}",
                )


@pytest.mark.fault("factory-keys", symptom=MISSING_KEY)
@pytest.mark.parametrize("source, target", [*pairs("moe"), *list(pairs("swiglu"))[:4], *list(pairs("grouped"))[4::5]])
def test_gated_model_resumes_exactly(pools, tmp_path, source, target):
    Story(pools, source, tmp_path).train_and_save().check(target)


@pytest.mark.fault("factory-keys", symptom=MISSING_KEY)
def test_seed_story_train_moe_with_fused_adam_resume_with_distributed_fused_adam_continue(pools, tmp_path):
    """The seed: a mixture of experts trained with fused_adam goes on with distributed_fused_adam, on two ranks."""
    story = Story(pools, Cell("moe", "fused", world=2), tmp_path).train_and_save()
    story.check(Cell("moe", "distributed", world=2))


@pytest.mark.fault("fused-param-groups", symptom=NO_STEP)
@pytest.mark.parametrize("source, target", [*pairs("plain")])
def test_plain_model_resumes_exactly(pools, tmp_path, source, target):
    Story(pools, source, tmp_path).train_and_save().check(target)


@pytest.mark.fault("stale-group-step", symptom=symptoms.GroupsNotRestored)
@pytest.mark.parametrize("world", (1, 2))
def test_step_in_a_saved_group_goes_away(pools, tmp_path, world):
    cell = Cell("plain", "distributed", world=world)
    Story(pools, cell, tmp_path).train_and_save(stale=True).check(cell)


@pytest.mark.fault("stale-group-step", symptom=(symptoms.StateDictChanged, NO_STEP))
@pytest.mark.parametrize("source", ("distributed", "fused"))
def test_callers_state_dict_is_left_alone(pools, tmp_path, source):
    story = Story(pools, Cell("plain", source), tmp_path).train_and_save()
    pools(1).run("resume.nemo.runs:load_unchanged", cell=Cell("plain", "distributed"), folder=story.folder)
