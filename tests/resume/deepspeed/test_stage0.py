"""Stage 0: the 16-bit wrappers keep fp32 masters, and a load without their states must not leave those behind."""

from __future__ import annotations

import glob
import os

import pytest
import torch

from resume import oracle, symptoms, wheel
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import BOTH, FRESH, MODULE_ONLY, NOOPT, Story, cells, variant
from resume.deepspeed.test_fresh_optimizer import remove_optimizer_files

STALE = {"symptom": symptoms.MastersStale}
HALVES = ("bf16", "fp16")
# <= 0.12 trains bf16 at stage 0 with BF16_Optimizer, which has no MoE
BF16_WRAPPED = not wheel.installed("deepspeed").version.startswith("0.12.")
DENSE = [*cells(HALVES, (0,)), *cells(HALVES, (0,), optimizer="fused")]
MOE = [
    cell
    for optimizer in ("adamw", "fused")
    for cell in cells(HALVES if BF16_WRAPPED else ("fp16",), (0,), model="moe", optimizer=optimizer)
]


def ids(some) -> list:
    return [pytest.param(cell, id=cell.id) for cell in some]


@pytest.mark.fault("stage0-stale-masters", **STALE)
@pytest.mark.parametrize("cell", ids(DENSE))
def test_masters_follow_the_loaded_weights(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_weights_only(story.resume(NOOPT), counters=True)


@pytest.mark.fault("stage0-stale-masters", **STALE)
@pytest.mark.parametrize("cell", ids(MOE))
def test_masters_of_experts_follow_the_loaded_weights(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    remove_optimizer_files(tmp_path)
    check_experts(story, story.resume(NOOPT))


def check_experts(story: Story, resumed: list[dict]) -> None:
    """As ``Story.check_weights_only``; a rank's reference starts from its own experts."""
    loaded = [r["loaded"] for r in resumed]
    oracle.check(story.saved, loaded, only={"weights", "buffers"}, what="after the load")
    oracle.check_masters_follow_weights(loaded, "after the load")
    reference = story.ranks.run(
        "resume.deepspeed.runs:reference", cell=story.cell, weights=[s.weights for s in story.saved]
    )
    fresh = [r["fresh"] for r in reference]
    only = {"masters", "partitions", "moments", "step", "groups"}
    oracle.check(fresh, loaded, only=only, as_symptom=FRESH, what="after the load")
    story.check_final([r["final"] for r in reference], resumed)


@pytest.mark.fault("stage0-stale-masters", **STALE)
@pytest.mark.parametrize("cell", ids(DENSE))
def test_masters_follow_weights_saved_without_an_optimizer(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    for path in glob.glob(os.path.join(tmp_path, "*", "mp_rank_*_model_states.pt")):
        content = torch.load(path, weights_only=False)
        content.pop("optimizer")
        torch.save(content, path)
    for path in glob.glob(os.path.join(tmp_path, "*", "*optim_states.pt")):
        os.remove(path)
    story.check_weights_only(story.resume(NOOPT), counters=True)


@pytest.mark.fault("stage0-stale-masters", **STALE)
@pytest.mark.parametrize("source", (1, 2))
@pytest.mark.parametrize("cell", ids(cells(HALVES, (0,))))
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


RIGHT = HALVES if BF16_WRAPPED else ("fp16",)  # BF16_Optimizer of <= 0.12 is wrong here too


@pytest.mark.guard
@pytest.mark.parametrize("load", [pytest.param(MODULE_ONLY, id="module-only"), pytest.param(BOTH, id="both")])
@pytest.mark.parametrize("cell", ids([*cells(RIGHT, (0,)), *cells(RIGHT, (0,), optimizer="fused")]))
def test_module_only(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_weights_only(story.resume(load), counters=False)


@pytest.mark.guard
@pytest.mark.parametrize("cell", ids([*cells(RIGHT, (0,), optimizer="fused"), Cell("fp16", 0, 1, scheduler=True)]))
def test_full_resume_is_exact(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume())
