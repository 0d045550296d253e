"""Stage 0: the 16-bit wrappers keep fp32 masters, and a load without their states must not leave those behind."""

from __future__ import annotations

import glob
import os

import pytest
import torch

from resume import oracle, symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import ANY_LOAD, BOTH, FRESH, MODULE_ONLY, NOOPT, RELEASE, Story, cells, loads, variant
from resume.deepspeed.test_fresh_optimizer import remove_optimizer_files
from resume.symptoms import crash

HALVES = ("bf16", "fp16")
# < 0.17 trains bf16 at stage 0 with BF16_Optimizer, later ones with the wrappers of fp16. BF16_Optimizer has the
# fault, and no MoE, in <= 0.12; 0.17 fails in every load into a wrapped one.
WRAPPED = RELEASE >= (0, 17)
RIGHT_BF16 = (0, 13) <= RELEASE < (0, 17)
# 0.17 returns from the step of an fp16 FusedAdam before it has made it: there is no training to resume
FUSED = HALVES if RELEASE != (0, 17) else ("bf16",)


def stage0(precisions, **common) -> list[Cell]:
    """Cells of both wrappers, where they train."""
    fused = [precision for precision in precisions if precision in FUSED]
    return [*cells(precisions, (0,), **common), *cells(fused, (0,), optimizer="fused", **common)]


DENSE = stage0(("fp16",) if RIGHT_BF16 else HALVES)
MOE = stage0(HALVES if WRAPPED else ("fp16",), model="moe")


def ids(some) -> list:
    return [pytest.param(cell, id=cell.id) for cell in some]


def stale(some) -> list:
    """As ``ids``, each with the mark of ``stage0-stale-masters``: 0.17 does not get as far with bf16."""
    return [
        pytest.param(
            cell,
            id=cell.id,
            marks=pytest.mark.fault(
                "stage0-stale-masters",
                symptom=symptoms.MastersStale if loads(cell) else ANY_LOAD,
            ),
        )
        for cell in some
    ]


@pytest.mark.parametrize("cell", stale(DENSE))
def test_masters_follow_the_loaded_weights(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_weights_only(story.resume(NOOPT), counters=True)


@pytest.mark.parametrize("cell", stale(MOE))
def test_masters_of_experts_follow_the_loaded_weights(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    remove_optimizer_files(tmp_path)
    check_experts(story, story.resume(NOOPT))


def check_experts(story: Story, resumed: list[dict]) -> None:
    """As ``Story.check_weights_only``; a rank's reference starts from its own experts."""
    loaded = [r["loaded"] for r in resumed]
    oracle.check(story.saved, loaded, only={"weights", "buffers"}, what="after the load")
    oracle.check_masters_follow_weights(loaded, "after the load")
    reference = story.reference(story.cell, [s.weights for s in story.saved])
    fresh = [r["fresh"] for r in reference]
    only = {"masters", "partitions", "moments", "step", "groups"}
    oracle.check(fresh, loaded, only=only, as_symptom=FRESH, what="after the load")
    story.check_final([r["final"] for r in reference], resumed)


@pytest.mark.parametrize("cell", stale(DENSE))
def test_masters_follow_weights_saved_without_an_optimizer(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    for path in glob.glob(os.path.join(tmp_path, "*", "mp_rank_*_model_states.pt")):
        content = torch.load(path, weights_only=False)
        content.pop("optimizer")
        torch.save(content, path)
    for path in glob.glob(os.path.join(tmp_path, "*", "*optim_states.pt")):
        os.remove(path)
    story.check_weights_only(story.resume(NOOPT), counters=True)


@pytest.mark.parametrize("source", (1, 2))
@pytest.mark.parametrize("cell", stale(c for c in DENSE if c.optimizer == "adamw"))
def test_masters_follow_weights_saved_at_another_stage(pools, tmp_path, cell, source):
    story = Story(pools, variant(cell, stage=source), tmp_path).train_and_save()
    resumed = Story(pools, cell, tmp_path)
    resumed.check_weights_only(resumed.resume(NOOPT), counters=True, saved=story.saved)


# --- what is right on the pristine release ---


@pytest.mark.guard
@pytest.mark.parametrize("load", [pytest.param(NOOPT, id="noopt"), pytest.param(BOTH, id="both")])
@pytest.mark.parametrize("cell", ids([*cells(("fp32",), (0,)), *cells(("fp32",), (0,), model="moe")]))
def test_fp32_has_no_masters_to_refresh(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path).train_and_save()
    resumed = story.resume(load)
    if cell.model == "moe":
        check_experts(story, resumed)
    else:
        story.check_weights_only(resumed, counters=load is NOOPT)


RIGHT = HALVES if RELEASE >= (0, 13) and RELEASE != (0, 17) else ("fp16",)


@pytest.mark.guard
@pytest.mark.parametrize("load", [pytest.param(MODULE_ONLY, id="module-only"), pytest.param(BOTH, id="both")])
@pytest.mark.parametrize("cell", ids(stage0(RIGHT)))
def test_module_only(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_weights_only(story.resume(load), counters=False)


@pytest.mark.guard
@pytest.mark.parametrize(
    "cell", ids([*(c for c in stage0(RIGHT) if c.optimizer == "fused"), Cell("fp16", 0, 1, scheduler=True)])
)
def test_full_resume_is_exact(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume())


if RIGHT_BF16:

    @pytest.mark.guard
    @pytest.mark.parametrize("cell", ids(stage0(("bf16",))))
    def test_bf16_optimizer_takes_its_masters_from_the_weights(pools, tmp_path, cell):
        story = Story(pools, cell, tmp_path).train_and_save()
        story.check_full(story.resume())
        story.check_weights_only(story.resume(NOOPT), counters=True)


@pytest.mark.fault("moe-fp32-states", symptom=crash("KeyError", "'optimizer'"))
@pytest.mark.parametrize("cell", ids(cells(("fp32",), (0,), model="moe")))
def test_fp32_resumes_experts(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume())


# --- bf16, where the wrappers of fp16 came to it before their checkpoints did ---

any_load = pytest.mark.fault("bf16-stage0-any-load", symptom=ANY_LOAD)


@pytest.mark.fault("bf16-stage0-stale-gradients", symptom=symptoms.Diverged)
@pytest.mark.parametrize("cell", ids([*cells(("bf16",), (0,)), *cells(("bf16",), (0,), model="moe")]))
def test_no_step_adds_to_the_gradients_of_the_last(pools, cell):
    left = max(pools(cell.world).run("resume.deepspeed.runs:gradients_left", cell=cell))
    if left:
        raise symptoms.Diverged(f"the next step starts from gradients of up to {left:.3g}: no resumed run can")


@any_load
@pytest.mark.parametrize("cell", ids(stage0(("bf16",))))
def test_bf16_resumes(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume())


@any_load
@pytest.mark.parametrize("load", [pytest.param(MODULE_ONLY, id="module-only"), pytest.param(BOTH, id="both")])
@pytest.mark.parametrize("cell", ids(stage0(("bf16",))))
def test_bf16_loads_the_module_only(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_weights_only(story.resume(load), counters=False)


@any_load
@pytest.mark.parametrize("cell", ids(cells(("bf16",), (0,), model="moe")))
def test_bf16_resumes_experts(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume())


@any_load
@pytest.mark.parametrize("cell", ids(cells(("bf16",), (0,))))
def test_bf16_says_that_optimizer_states_are_missing(pools, tmp_path, cell):
    """A checkpoint of the pristine release, which left them out."""
    story = Story(pools, cell, tmp_path).train_and_save()
    for path in tmp_path.glob("*/mp_rank_*_model_states.pt"):
        torch.save({**torch.load(path, weights_only=False), "optimizer": None}, path)
    for outcome in story.ranks.outcomes("resume.deepspeed.runs:resume", cell=cell, folder=story.folder):
        assert isinstance(outcome, symptoms.Symptom), f"loaded states that are nowhere: {outcome}"
        if not crash("ValueError", "holds no optimizer states").matches(outcome):
            raise outcome


# --- bf16 with gradients that accumulate in fp32: 0.17 takes the request for that of a wrapper ---

accum = pytest.mark.fault("bf16-accum-any-load", symptom=ANY_LOAD)
ACCUM = cells(("bf16",), (0, 1), grad_accum="fp32")


@accum
@pytest.mark.parametrize("cell", ids(ACCUM))
def test_gradients_in_fp32_resume(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume())


@accum
@pytest.mark.parametrize("load", [pytest.param(NOOPT, id="noopt"), pytest.param(BOTH, id="both")])
@pytest.mark.parametrize("cell", ids(ACCUM))
def test_gradients_in_fp32_start_from_the_weights(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_weights_only(story.resume(load), counters=load is NOOPT)
