"""Loads into engines that freeze parameters: other ones than the save, on another number of ranks, or experts."""

from __future__ import annotations

import pytest
import torch

from resume import oracle, symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import ANY_LOAD, BOTH, MODULE_ONLY, NOOPT, OWN_FILES, RELEASE, Story, variant
from resume.symptoms import crash


def each(*cells: Cell) -> list:
    return [pytest.param(cell, id=cell.id) for cell in cells]


def loads(**some) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("load", some.values(), ids=some.keys())


# --- what was right ---


@pytest.mark.guard
@pytest.mark.parametrize(
    "cell", each(*(Cell("bf16", stage, 2, model) for stage in (1, 2, 3) for model in ("frozen", "lora", "tied")))
)
def test_full_resume(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume())


@pytest.mark.guard
@pytest.mark.parametrize(
    "cell", each(*(Cell("bf16", stage, 2, model) for stage in (2, 3) for model in ("frozen", "lora")))
)
def test_weights_only(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_weights_only(story.resume(BOTH), counters=False)


@pytest.mark.guard
@pytest.mark.parametrize("cell", each(Cell("bf16", 2, 2, "lora"), Cell("bf16", 3, 2, "lora")))
def test_parameters_frozen_at_the_save_may_be_trained(pools, tmp_path, cell):
    cell = variant(cell, model="frozen")
    saved = Story(pools, cell, tmp_path).train_and_save().saved
    unfrozen = Story(pools, variant(cell, model="dense"), tmp_path)
    unfrozen.check_weights_only(unfrozen.resume(BOTH), counters=False, saved=saved)


# --- parameters that were not frozen at the save ---

FREEZE = each(
    *(Cell(precision, stage, 2, "frozen") for precision in ("bf16", "fp32") for stage in (2, 3)),
    Cell("fp16", 2, 1, "frozen"),
    Cell("fp16", 3, 1, "frozen"),
)


@pytest.mark.fault("frozen-names", symptom=crash("KeyError", "up.weight"))
@loads(noopt=NOOPT, both=BOTH)
@pytest.mark.parametrize("cell", FREEZE)
def test_parameters_trained_at_the_save_may_be_frozen(pools, tmp_path, cell, load):
    saved = Story(pools, variant(cell, model="dense"), tmp_path).train_and_save().saved
    frozen = Story(pools, cell, tmp_path)
    frozen.check_weights_only(frozen.resume(load), counters=load is NOOPT, saved=saved)


@pytest.mark.fault("frozen-names", symptom=crash("KeyError", "base.up.weight"))
@pytest.mark.parametrize("cell", each(Cell("bf16", 2, 2, "lora"), Cell("bf16", 3, 2, "lora")))
def test_a_base_model_loads_below_adapters(pools, tmp_path, cell):
    base = Story(pools, variant(cell, model="based"), tmp_path).train_and_save().saved
    lora = Story(pools, cell, tmp_path)
    loaded = [r["loaded"] for r in lora.resume({**BOTH, "load_module_strict": False})]
    for rank, snap in enumerate(loaded):
        for name, weight in base[rank].weights.items():
            if not torch.equal(snap.weights[name], weight):
                raise symptoms.WeightsNotRestored(f"rank {rank}: {name} is not the base model's")


# --- optimizer states, which fit only the parameters that they were saved of ---


OTHERS = (symptoms.MastersStale, crash("RuntimeError"), crash("KeyError"))
if RELEASE == (0, 17):  # which loads nothing where gradients accumulate in fp32
    OTHERS += (ANY_LOAD,)


@pytest.mark.fault("frozen-full-load", symptom=OTHERS)
@pytest.mark.parametrize("then, now", (("frozen", "dense"), ("dense", "frozen")))
@pytest.mark.parametrize(
    "cell",
    each(
        *(Cell("bf16", stage, 2) for stage in (1, 2, 3)),
        Cell("fp16", 1, 1),
        Cell("fp32", 2, 1),
        Cell("bf16", 1, 2, grad_accum="fp32"),
        *([Cell("bf16", 0, 2)] if OWN_FILES else []),
    ),
)
def test_optimizer_states_of_other_parameters_are_refused(pools, tmp_path, cell, then, now):
    Story(pools, variant(cell, model=then), tmp_path).train_and_save()
    ranks = pools(cell.world)
    outcomes = ranks.outcomes("resume.deepspeed.runs:resume", cell=variant(cell, model=now), folder=str(tmp_path))
    failed = [outcome for outcome in outcomes if isinstance(outcome, symptoms.Symptom)]
    if not failed:
        oracle.check_masters_follow_weights([outcome["loaded"] for outcome in outcomes], "after the load")
        raise AssertionError("it was loaded all the same")
    for outcome in failed:
        if not crash("ValueError", "load only the weights, with load_optimizer_states=False").matches(outcome):
            raise outcome
    assert len(failed) == cell.world


# --- ZeRO-3 on another number of ranks ---


@pytest.mark.fault("zero3-frozen-world-size", symptom=crash("RuntimeError", "size"))
@loads(both=BOTH, noopt=NOOPT)
@pytest.mark.parametrize(
    "cell",
    each(*(Cell(p, 3, 2, "frozen") for p in ("bf16", "fp16", "fp32")), Cell("bf16", 3, 2, "lora")),
)
def test_frozen_weights_load_on_fewer_ranks(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path).train_and_save()
    fewer = Story(pools, variant(cell, world=1), tmp_path)
    fewer.check_weights_only(fewer.resume(load), counters=load is NOOPT, saved=story.saved[:1])


@pytest.mark.fault("zero3-frozen-world-size", symptom=crash("RuntimeError", "size"))
@pytest.mark.parametrize("cell", each(Cell("bf16", 3, 2, "frozen")))
def test_module_only_loads_frozen_weights_on_fewer_ranks(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    fewer = Story(pools, variant(cell, world=1), tmp_path)
    fewer.check_weights_only(fewer.resume(MODULE_ONLY), counters=False, saved=story.saved[:1])


# --- frozen experts ---


@pytest.mark.fault("moe-frozen-experts", symptom=symptoms.WeightsNotRestored)
@loads(full={}, noopt=NOOPT)
@pytest.mark.parametrize("cell", each(*(Cell(p, 2, 2, "frozen-moe") for p in ("bf16", "fp16", "fp32"))))
def test_each_rank_loads_its_own_frozen_experts(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path).train_and_save()
    loaded = [r["loaded"] for r in story.resume(load)]
    oracle.check(story.saved, loaded, only={"weights", "buffers"}, what="after the load")
    if not load:
        story.check_full(story.resume())


@pytest.mark.guard
@pytest.mark.parametrize("cell", each(Cell("bf16", 1, 2, "frozen-moe"), Cell("bf16", 2, 1, "frozen-moe")))
def test_frozen_experts(pools, tmp_path, cell):
    test_each_rank_loads_its_own_frozen_experts(pools, tmp_path, cell, {})
