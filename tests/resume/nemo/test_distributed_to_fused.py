"""From distributed_fused_adam back to fused_adam."""

from __future__ import annotations

import pytest

from resume.nemo.engines import Cell
from resume.nemo.story import Story
from resume.symptoms import crash

# a load that leaves param groups without options raises nothing: the first step does
NO_OPTIONS = crash("KeyError", "bias_correction")


def worlds(model: str):
    for saved, loaded in ((1, 1), (2, 2), (2, 1)):
        yield pytest.param(
            Cell(model, "distributed", world=saved), Cell(model, "fused", world=loaded), id=f"{model}-{saved}to{loaded}"
        )


@pytest.mark.fault("dist-to-fused", symptom=NO_OPTIONS)
@pytest.mark.parametrize("source, target", [*worlds("plain")])
def test_plain_model_resumes_exactly(pools, tmp_path, source, target):
    Story(pools, source, tmp_path).train_and_save().check(target)


@pytest.mark.fault("dist-to-fused", symptom=crash("CheckpointException", "optimizer.state.fp32_param."))
@pytest.mark.parametrize("spelling", (None, "param"))
@pytest.mark.parametrize("source, target", [*worlds("moe"), *list(worlds("swiglu"))[:1], *list(worlds("grouped"))[1:2]])
def test_gated_model_resumes_exactly(pools, tmp_path, source, target, spelling):
    """Whichever release wrote the checkpoint."""
    Story(pools, source, tmp_path).train_and_save(spelling=spelling).check(target)


@pytest.mark.fault("dist-to-fused", symptom=NO_OPTIONS)
def test_remainders_resume_exactly(pools, tmp_path):
    story = Story(pools, Cell("plain", "distributed", "remainders", world=2), tmp_path).train_and_save()
    story.check(Cell("plain", "fused", world=2))
