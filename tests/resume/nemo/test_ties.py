"""Masters halfway between two bf16 values, where weights were rounded half to even and remainders mean half up."""

from __future__ import annotations

import pytest

from resume import symptoms
from resume.nemo.engines import Cell
from resume.nemo.story import Story
from resume.symptoms import crash


@pytest.mark.fault("bf16-ties", symptom=symptoms.MastersStale)
@pytest.mark.parametrize("model", ("plain", "moe"))
@pytest.mark.parametrize("world", (1, 2))
def test_masters_on_ties_from_stored_params(pools, tmp_path, model, world):
    story = Story(pools, Cell(model, "distributed", world=world), tmp_path).train_and_save(ties=True)
    target = Cell(model, "distributed", "remainders", world=world)
    oracle_first(story, target)


def oracle_first(story: Story, target: Cell) -> None:
    """Weights on ties are one bf16 unit from the save's by design; what must not be is another master."""
    resumed = story.resume(target)
    from resume import oracle

    oracle.check([story.saved] * len(resumed), [r["loaded"] for r in resumed], only={"masters"}, what="after the load")
    story.check(target)


@pytest.mark.fault("bf16-ties", symptom=(symptoms.MastersStale, crash("KeyError", "step")))
@pytest.mark.parametrize("world", (1, 2))
def test_masters_on_ties_from_fused_adam(pools, tmp_path, world):
    story = Story(pools, Cell("plain", "fused", world=world), tmp_path).train_and_save(ties=True)
    oracle_first(story, Cell("plain", "distributed", "remainders", world=world))


@pytest.mark.guard
def test_ties_do_not_matter_where_masters_are_stored(pools, tmp_path):
    cell = Cell("plain", "distributed", world=2)
    Story(pools, cell, tmp_path).train_and_save(ties=True).check(cell)
