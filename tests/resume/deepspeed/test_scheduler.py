"""Learning-rate schedulers: the lr of the first step after a load, and checkpoints that were saved without one."""

from __future__ import annotations

import pytest

from resume import oracle, symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import ANY_LOAD, NOOPT, RELEASE, Story, cells, variant
from resume.symptoms import crash

# 0.17 loads nothing into the wrappers of bf16, whatever the scheduler
STALE = (symptoms.GroupsNotRestored, ANY_LOAD) if RELEASE == (0, 17) else symptoms.GroupsNotRestored
LR_STALE = pytest.mark.fault("noopt-scheduler-lr", symptom=STALE)
NOT_SAVED = pytest.mark.fault(
    "scheduler-not-saved", symptom=crash("TypeError", "'NoneType' object is not subscriptable")
)


def ids(some) -> list:
    return [pytest.param(cell, id=cell.id) for cell in some]


SCHEDULED = [*cells(("bf16",), scheduler=True), Cell("fp16", 0, scheduler=True), Cell("fp32", 3, scheduler=True)]
SCHEDULED += [Cell("bf16", 1, grad_accum="fp32", scheduler=True)]


@LR_STALE
@pytest.mark.parametrize("cell", ids(SCHEDULED))
def test_lr_is_the_scheduler_s_without_optimizer_states(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    resumed = story.resume(NOOPT)
    loaded = [r["loaded"] for r in resumed]
    oracle.check(story.saved, loaded, only={"weights", "scheduler", "groups"}, what="after the load")
    oracle.check(
        [r["final"] for r in story.trained], [r["final"] for r in resumed], only={"scheduler", "groups"}, what="later"
    )


@LR_STALE
@pytest.mark.parametrize("name", ("CosineAnnealingLR", "LambdaLR", "OneCycle"))
@pytest.mark.parametrize("stage", (0, 2))
def test_lr_is_any_scheduler_s(pools, tmp_path, stage, name):
    result = pools(1).run(
        "resume.deepspeed.schedulers:save_and_resume",
        cell=Cell("bf16", stage),
        folder=str(tmp_path),
        name=name,
        load=NOOPT,
    )
    for when in ("loaded", "final"):
        expected, found = ([r[when]] for r in (result[0]["saved_run"], result[0]["resumed"]))
        oracle.check(expected, found, only={"scheduler", "groups"}, what=when)


@pytest.mark.guard
@pytest.mark.parametrize("cell", ids(cells(("bf16",), worlds=(1,), scheduler=True)))
def test_full_resume_with_a_scheduler_is_exact(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume())


@pytest.mark.guard
@pytest.mark.parametrize("cell", ids(cells(("bf16",), worlds=(1,), scheduler=True)))
def test_scheduler_not_asked_for_starts_anew(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    resumed = story.resume({"load_lr_scheduler_states": False})
    fresh, loaded = ([r[when] for r in resumed] for when in ("fresh", "loaded"))
    oracle.check(fresh, loaded, only={"scheduler"})
    oracle.check(story.saved, loaded, only={"weights", "masters", "moments", "step", "groups", "counters"})


@NOT_SAVED
@pytest.mark.parametrize("cell", ids(cells(("bf16",)) + cells(("fp16", "fp32"), (0,), (1,))))
def test_checkpoint_without_a_scheduler_loads(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    resumed = story.resume(cell=variant(cell, scheduler=True))
    fresh, loaded = ([r[when] for r in resumed] for when in ("fresh", "loaded"))
    oracle.check(fresh, loaded, only={"scheduler"})
    oracle.check(story.saved, loaded, only={"weights", "masters", "moments", "step", "groups", "counters", "client"})
