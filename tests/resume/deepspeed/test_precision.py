"""Checkpoints of another precision: fp32 masters and moments carry over, a loss scaler does not."""

from __future__ import annotations

import pytest

from resume import oracle, symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import ANY_LOAD, OWN_FILES, RELEASE, Story, loads, variant
from resume.deepspeed.test_load_errors import ADVICE, check_raises
from resume.symptoms import crash

NO_FILE = crash("FileNotFoundError", "[Errno 2] No such file")


def pairs(some) -> list:
    return [pytest.param(a, b, id=f"{a.id}-to-{b.precision}") for a, b in some]


def to(cell: Cell, precision: str) -> tuple[Cell, Cell]:
    return cell, variant(cell, precision=precision)


# what the file names of bf16 differ from
OTHER = [to(Cell("bf16", s, 3 - w), p) for s in (1, 2, 3) for w, p in ((1, "fp16"), (2, "fp32"))]
OTHER += [to(Cell(p, s, w), "bf16") for s in (1, 2, 3) for w, p in ((1, "fp16"), (2, "fp32"))]


@pytest.mark.fault("zero-other-precision", symptom=NO_FILE)
@pytest.mark.parametrize("saved, cell", pairs(OTHER))
def test_masters_and_moments_carry_over(pools, tmp_path, saved, cell):
    story = Story(pools, saved, tmp_path).train_and_save()
    resumed = story.resume(cell=cell)
    loaded = [r["loaded"] for r in resumed]
    only = {"masters", "partitions", "moments", "step", "groups", "counters", "client"}
    oracle.check(story.saved, loaded, only=only, what="after the load")
    oracle.check_masters_follow_weights([r["final"] for r in resumed], "training on")
    assert 1e-4 < oracle.moved(loaded, [r["final"] for r in resumed]) < 0.1


@pytest.mark.fault("zero-other-precision", symptom=NO_FILE)
@pytest.mark.parametrize("stage, world", ((1, 2), (2, 1)))
def test_checkpoint_without_zero_says_what_to_do(pools, tmp_path, stage, world):
    cell = Cell("fp16" if OWN_FILES else "bf16", stage, world)
    Story(pools, variant(cell, stage=0), tmp_path).train_and_save()
    check_raises(pools, cell, tmp_path, {}, "FileNotFoundError", "optim_states.pt", ADVICE)


SCALED = [to(Cell("fp32", s, w), "fp16") for s in (1, 2, 3) for w in (1, 2)]
# 0.17 scales the loss of this, too
SCALED += [] if OWN_FILES or not loads(Cell("bf16", 0, 2)) else [to(Cell("bf16", 0, 2), "fp16")]


@pytest.mark.fault("loss-scaler-precision", symptom=symptoms.LossScaleNotRestored)
@pytest.mark.parametrize("saved, cell", pairs(SCALED))
def test_fp16_keeps_its_loss_scaler(pools, tmp_path, saved, cell):
    story = Story(pools, saved, tmp_path).train_and_save()
    resumed = story.resume(cell=cell)
    oracle.check([r["fresh"] for r in resumed], [r["loaded"] for r in resumed], only={"scale"}, what="after the load")


# 0.17 trains bf16 without ZeRO in the wrapper of fp16, which scales its loss and saves that as fp16 does
NOT_SAVED = crash("TypeError", "'NoneType' object is not subscriptable")
WRAPPED = [("bf16", "fp16", NOT_SAVED), ("fp16", "bf16", ANY_LOAD)]


@pytest.mark.parametrize(
    "saved, precision",
    [
        pytest.param(
            Cell(a, 0, w), b, id=f"{a}-z0-{w}r-to-{b}", marks=pytest.mark.fault("bf16-stage0-scale", symptom=s)
        )
        for a, b, s in WRAPPED
        for w in (1, 2)
    ],
)
def test_a_wrapper_keeps_its_own_loss_scale(pools, tmp_path, saved, precision):
    story = Story(pools, saved, tmp_path).train_and_save()
    resumed = story.resume(cell=variant(saved, precision=precision))
    oracle.check([r["fresh"] for r in resumed], [r["loaded"] for r in resumed], only={"scale"}, what="after the load")


# bf16 checkpoints under ZeRO have file names of their own, which pristine releases do not find
ROUNDED = [to(Cell("fp16", s, w), "fp32") for s in (1, 2) for w in (1, 2)]
ROUNDED += [to(Cell("bf16", 0, w), "fp16") for w in (1, 2) if RELEASE >= (0, 18)]


@pytest.mark.fault("other-precision-weights", symptom=symptoms.MastersStale)
@pytest.mark.parametrize("saved, cell", pairs(ROUNDED))
def test_weights_are_the_masters(pools, tmp_path, saved, cell):
    story = Story(pools, saved, tmp_path).train_and_save()
    loaded = [r["loaded"] for r in story.resume(cell=cell)]
    oracle.check(story.saved, loaded, only={"masters"}, what="after the load")
    oracle.check_masters_follow_weights(loaded, "after the load")
