"""Loads that cannot work: every rank raises, and the error says which file or state is missing and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resume import symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import ANY_LOAD, NOOPT, OWN_FILES, RELEASE, Story, cells, variant
from resume.symptoms import crash

UNCLEAR = pytest.mark.fault("empty-assertion", symptom=crash("AssertionError"))
ADVICE = "load_optimizer_states=False"


def ids(some) -> list:
    return [pytest.param(cell, id=cell.id) for cell in some]


def check_raises(pools, cell: Cell, folder, load: dict, type_name: str, *words: str) -> None:
    """Every rank raises; one of them ``type_name``, and each error has all ``words``. Raises what is not so."""
    outcomes = pools(cell.world).outcomes(
        "resume.deepspeed.runs:resume", cell=cell, folder=str(folder), load=load, grace=8.0
    )
    check_outcomes(outcomes, type_name, *words)


def check_outcomes(outcomes: list, type_name: str, *words: str) -> None:
    """As ``check_raises``, of outcomes."""
    hung = [o for o in outcomes if isinstance(o, (symptoms.PeersHung, symptoms.Hang))]
    if hung:
        raise hung[0]
    for outcome in outcomes:
        assert isinstance(outcome, symptoms.Crash), f"the load did not fail: {outcome}"
        named = outcome.type_name == type_name or f"{type_name}: " in outcome.text
        if not (outcome.upstream and named and all(word in outcome.text for word in words)):
            raise outcome
    assert any(o.type_name == type_name for o in outcomes)


def files(folder, pattern: str) -> list[Path]:
    """The files below ``folder`` that match; there must be some."""
    found = sorted(Path(folder).glob(f"*/{pattern}"))
    assert found, f"no {pattern} in {folder}"
    return found


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


# --- which file is missing ---


@UNCLEAR
@pytest.mark.parametrize("cell", ids([Cell("fp32", 0), Cell("bf16", 1, 2), Cell("fp16", 2), Cell("bf16", 3, 2)]))
def test_tag_that_does_not_exist(pools, tmp_path, cell):
    Story(pools, cell, tmp_path).train_and_save()
    check_raises(pools, cell, tmp_path, {"tag": "mistyped"}, "FileNotFoundError", str(tmp_path / "mistyped"), "tag")


@UNCLEAR
@pytest.mark.parametrize("cell", ids([Cell("bf16", 0), Cell("bf16", 2, 2), Cell("bf16", 3, 2)]))
def test_model_file_that_is_missing(pools, tmp_path, cell):
    Story(pools, cell, tmp_path).train_and_save()
    for file in files(tmp_path, "*model_states.pt"):
        file.unlink()
    check_raises(pools, cell, tmp_path, {}, "FileNotFoundError", "mp_rank_00_model_states.pt", "missing")


STAGES = [(0, 3, {}), (1, 3, {}), (2, 3, {}), (3, 0, {}), (3, 2, {})]


@UNCLEAR
@pytest.mark.parametrize("saved, stage, load", STAGES, ids=[f"{a}-{b}" for a, b, _ in STAGES])
def test_stage_that_cannot_load_the_other(pools, tmp_path, saved, stage, load):
    cell = Cell("bf16", stage, 2 - stage % 2)
    Story(pools, variant(cell, stage=saved), tmp_path).train_and_save()
    check_raises(pools, cell, tmp_path, load, "ValueError", f"ZeRO stage {stage}", "ds_to_universal.py")


@UNCLEAR
def test_pipeline_layer_that_is_missing(pools, tmp_path):
    common = {"cell": Cell("fp32", 0, 2), "folder": str(tmp_path), "stages": 1}
    pools(2).run("resume.deepspeed.pipeline:train_and_save", **common)
    files(tmp_path, "layer_01-model_states.pt")[0].unlink()
    outcomes = pools(2).outcomes("resume.deepspeed.pipeline:resume", **common, load={}, grace=8.0)
    check_outcomes(outcomes, "FileNotFoundError", "layer_01-model_states.pt", "missing")


# --- one rank cannot read its file ---

OPTIM, MODEL = "*zero_pp_rank_1_*optim_states.pt", "zero_pp_rank_1_*model_states.pt"
ONE_RANK = [
    (Cell("bf16", 1, 2), OPTIM, Path.unlink),
    (Cell("bf16", 1, 2), OPTIM, truncate),
    (Cell("fp16", 2, 2), OPTIM, Path.unlink),
    (Cell("bf16", 1, 2, grad_accum="fp32"), "*zero_pp_rank_0_*optim_states.pt", Path.unlink),
    (Cell("bf16", 3, 2), OPTIM, Path.unlink),
    (Cell("bf16", 3, 2), OPTIM, truncate),
    (Cell("fp32", 3, 2), MODEL, Path.unlink),
    (Cell("fp32", 3, 2), MODEL, truncate),
    (Cell("fp16", 0, 2, model="moe"), "layer_0_expert_1_*model_states.pt", Path.unlink),
    (Cell("fp16" if OWN_FILES else "bf16", 0, 2, model="moe"), "expp_rank_1_*optim_states.pt", truncate),
]


# 0.17 loads nothing into the wrappers of bf16, so that every rank raises
HUNG = (symptoms.PeersHung, ANY_LOAD) if RELEASE == (0, 17) else symptoms.PeersHung


@pytest.mark.fault("missing-shard-hang", symptom=HUNG)
@pytest.mark.parametrize(
    "cell, pattern, damage", [pytest.param(c, p, d, id=f"{c.id}-{p.strip('*')}-{d.__name__}") for c, p, d in ONE_RANK]
)
def test_all_ranks_raise_where_one_cannot_read(pools, tmp_path, cell, pattern, damage):
    Story(pools, cell, tmp_path).train_and_save()
    (file,) = files(tmp_path, pattern)
    damage(file)
    error = "RuntimeError" if damage is truncate else "FileNotFoundError"
    check_raises(pools, cell, tmp_path, {}, error, file.name)


# --- optimizer states of another kind, without ZeRO ---

ANY = (crash("TypeError", "NoneType"), crash("AttributeError", "NoneType"), crash("KeyError"))
ANY += (crash("ValueError", "parameter group"),)
if RELEASE == (0, 17):  # as above
    ANY += (ANY_LOAD,)
MISMATCHES = [
    (Cell("bf16", 1, 2), Cell("bf16", 0, 2)),
    (Cell("fp16", 2), Cell("fp16", 0)),
    (Cell("fp32", 1), Cell("fp32", 0)),
    (Cell("bf16", 0), Cell("fp32", 0)),
    (Cell("fp32", 0, 2), Cell("fp16", 0, 2)),
    (Cell("fp16", 0), Cell("fp16", 0, optimizer="fused")),
    (Cell("bf16", 0, optimizer="fused"), Cell("bf16", 0)),
]
if OWN_FILES:
    MISMATCHES = [(saved, cell) for saved, cell in MISMATCHES if cell.precision != "bf16"]


@pytest.mark.fault("stage0-optimizer-mismatch", symptom=ANY)
@pytest.mark.parametrize("saved, cell", [pytest.param(a, b, id=f"{a.id}-to-{b.id}") for a, b in MISMATCHES])
def test_optimizer_states_of_another_kind(pools, tmp_path, saved, cell):
    Story(pools, saved, tmp_path).train_and_save()
    check_raises(pools, cell, tmp_path, {}, "ValueError", "mp_rank_00_model_states.pt", ADVICE)


# --- a model without experts ---


@pytest.mark.fault("moe-dense-checkpoint", symptom=crash("KeyError", "num_experts"))
@pytest.mark.parametrize("load", ({}, NOOPT), ids=("full", "noopt"))
@pytest.mark.parametrize("cell", ids(cells(("bf16",), (0, 2), model="moe")))
def test_dense_checkpoint_into_a_model_with_experts(pools, tmp_path, cell, load):
    Story(pools, variant(cell, model="dense"), tmp_path).train_and_save()
    check_raises(pools, cell, tmp_path, load, "ValueError", "mp_rank_00_model_states.pt", "MoE")
