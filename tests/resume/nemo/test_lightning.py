"""Sharded state dicts made by nemo.lightning, which 3.0.0 no longer has."""

from __future__ import annotations

import pytest

from resume import symptoms
from resume.nemo.engines import Cell
from resume.nemo.story import Story
from resume.symptoms import crash


@pytest.mark.fault("lightning-is-loading", symptom=crash("TypeError", "is_loading"))
@pytest.mark.parametrize("model, world", [("plain", 1), ("moe", 2)])
@pytest.mark.parametrize("masters", ("params", "remainders"))
def test_distributed_optimizer_saves_and_loads(pools, tmp_path, model, world, masters):
    cell = Cell(model, "distributed", masters, world=world, lightning=True)
    Story(pools, cell, tmp_path).train_and_save().check(cell)


@pytest.mark.fault("fresh-main-params-empty", symptom=symptoms.MomentsNotRestored)
@pytest.mark.parametrize("model, world", [("plain", 1), ("plain", 2), ("moe", 2)])
def test_fresh_fused_adam_gets_its_moments(pools, tmp_path, model, world):
    """The run that loads has not stepped yet, as any run that resumes."""
    cell = Cell(model, "fused", world=world, lightning=True)
    Story(pools, cell, tmp_path).train_and_save().check(cell, trained=0)
