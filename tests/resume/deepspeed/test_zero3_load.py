"""ZeRO-3 keeps its weights in the optimizer files: loads that want only those, and the tag they are asked for."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from resume import oracle, symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import BOTH, MODULE_ONLY, NOOPT, Story, cells, loads, variant
from resume.deepspeed.test_fresh_optimizer import remove_optimizer_files
from resume.symptoms import crash

LOADS = {"noopt": NOOPT, "both": BOTH}
ZERO3 = cells(stages=(3,))


def ids(some) -> list:
    return [pytest.param(cell, id=cell.id) for cell in some]


# --- load_module_only=True, which leaves load_optimizer_states at its default, true ---

OTHERS = [Cell("bf16", 3, w, load_from_fp32=False) for w in (1, 2)] + [Cell("fp16", 3, 1, optimizer="fused")]


@pytest.mark.fault("zero3-module-only", symptom=symptoms.WeightsNotRestored)
@pytest.mark.parametrize("cell", ids(ZERO3 + OTHERS))
def test_module_only_loads_the_weights(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_weights_only(story.resume(MODULE_ONLY), counters=False)


@pytest.mark.fault("zero3-module-only", symptom=symptoms.WeightsNotRestored)
@pytest.mark.parametrize("cell", ids(cells(("bf16", "fp32"), (3,), (2,))))
def test_module_only_loads_the_weights_on_fewer_ranks(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    fewer = Story(pools, variant(cell, world=1), tmp_path)
    fewer.check_weights_only(fewer.resume(MODULE_ONLY), counters=False, saved=story.saved[:1])


@pytest.mark.fault("zero3-module-only", symptom=symptoms.WeightsNotRestored)
@pytest.mark.parametrize("cell", ids(cells(("bf16",), (3,))))
def test_module_only_reports_weights_that_are_missing(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    remove_optimizer_files(tmp_path)
    outcomes = story.ranks.outcomes("resume.deepspeed.runs:resume", cell=cell, folder=story.folder, load=MODULE_ONLY)
    if not any(isinstance(outcome, symptoms.Symptom) for outcome in outcomes):
        story.check_weights_only(outcomes, counters=False)
        raise AssertionError("the weights were restored from files that were deleted")
    for outcome in outcomes:
        if not crash("FileNotFoundError", "optim_states.pt").matches(outcome):
            raise outcome


@pytest.mark.fault("zero3-module-only", symptom=crash("AttributeError", "_restore_from_bit16_weights"))
@pytest.mark.parametrize("load", (NOOPT, BOTH, MODULE_ONLY), ids=("noopt", "both", "module"))
@pytest.mark.parametrize("cell", ids(cells(("bf16",), (3,))))
def test_weights_load_without_an_optimizer(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path).train_and_save()
    loaded = story.ranks.run("resume.deepspeed.fresh:load_without_optimizer", cell=cell, folder=story.folder, load=load)
    oracle.check(story.saved, loaded, only={"weights", "buffers"}, what="after the load")


# --- a model file whose parameters go by other names, or are not there ---


@pytest.mark.guard
@pytest.mark.parametrize("rename", (True, False), ids=("renamed", "dropped"))
@pytest.mark.parametrize("cell", ids(cells(("bf16",), (3,))))
def test_state_dict_hooks_may_change_the_model_file(pools, tmp_path, cell, rename):
    story = Story(pools, cell, tmp_path).train_and_save()
    for path in tmp_path.glob("*/zero_pp_rank_*_model_states.pt"):
        content = torch.load(path, weights_only=False)
        module, kept = content["module"], content["buffer_names"]
        content["module"] = {n if n in kept else f"inner.{n}": t for n, t in module.items() if rename or n in kept}
        torch.save(content, path)
    loaded = [r["loaded"] for r in story.resume(NOOPT)]
    oracle.check(story.saved, loaded, only={"weights", "buffers"}, what="after the load")


# --- the tag ---

CELLS_AND_LOADS = [pytest.param(c, load, id=f"{c.id}-{name}") for c in ZERO3 for name, load in LOADS.items()]


def two_saves(pools, cell: Cell, folder, first, second) -> tuple[Story, Story]:
    """Two runs saved under tags of their own in one folder; ``latest`` names the second."""
    one = Story(pools, cell, folder).train_and_save(tag=first)
    two = Story(pools, cell, folder).train_and_save(tag=second, seed=7)
    return one, two


@pytest.mark.fault("zero3-tag-ignored", symptom=symptoms.WeightsNotRestored)
@pytest.mark.parametrize("cell, load", CELLS_AND_LOADS)
def test_tag_is_the_one_asked_for(pools, tmp_path, cell, load):
    asked_for, _ = two_saves(pools, cell, tmp_path, "asked-for", "newest")
    asked_for.check_weights_only(asked_for.resume({**load, "tag": "asked-for"}), counters=load is NOOPT)


@pytest.mark.fault("zero3-tag-ignored", symptom=symptoms.WeightsNotRestored)
@pytest.mark.parametrize("cell, load", [p for p in CELLS_AND_LOADS if p.values[0].precision == "bf16"])
def test_tag_may_be_an_integer(pools, tmp_path, cell, load):
    asked_for, _ = two_saves(pools, cell, tmp_path, 3, 6)
    asked_for.check_weights_only(asked_for.resume({**load, "tag": 3}), counters=load is NOOPT)


@pytest.mark.fault("zero3-tag-ignored", symptom=crash("ValueError", "Unable to find 'latest' file"))
@pytest.mark.parametrize("tag", ("asked-for", 3))
@pytest.mark.parametrize("cell, load", [p for p in CELLS_AND_LOADS if p.values[0].precision == "bf16"])
def test_tag_needs_no_latest_file(pools, tmp_path, cell, load, tag):
    story = Story(pools, cell, tmp_path).train_and_save(tag=tag)
    os.remove(tmp_path / "latest")
    story.check_weights_only(story.resume({**load, "tag": tag}), counters=load is NOOPT)


@pytest.mark.guard
@pytest.mark.parametrize("tag", ("asked-for", 3))
@pytest.mark.parametrize("cell", ids(c for c in cells(("bf16",)) if loads(c)))
def test_tag_of_a_full_load(pools, tmp_path, cell, tag):
    asked_for, _ = two_saves(pools, cell, tmp_path, tag, "newest")
    os.remove(tmp_path / "latest")
    asked_for.check_full(asked_for.resume({"tag": tag}))


@pytest.mark.guard
@pytest.mark.parametrize("cell", ids(cells(("bf16",), (3,))))
def test_no_tag_means_the_latest(pools, tmp_path, cell):
    _, newest = two_saves(pools, cell, tmp_path, "older", "newest")
    newest.check_full(newest.resume())


# --- the weights of a ZeRO-3 checkpoint at another stage ---

ELSEWHERE = [Cell("bf16", 0, 1), Cell("bf16", 1, 2), Cell("fp16", 2, 2), Cell("fp32", 0, 2), Cell("fp32", 1, 1)]


@pytest.mark.fault("zero3-weights-elsewhere", symptom=crash("AssertionError"))
@pytest.mark.parametrize("load", (NOOPT, BOTH, MODULE_ONLY), ids=("noopt", "both", "module"))
@pytest.mark.parametrize("cell", ids(ELSEWHERE))
def test_weights_load_at_other_stages(pools, tmp_path, cell, load):
    story = Story(pools, variant(cell, stage=3), tmp_path).train_and_save()
    saved = [replace(s, partitions={}) for s in story.saved]
    story.check_weights_only(story.resume(load, cell=cell), counters=load is NOOPT, saved=saved, cell=cell)
