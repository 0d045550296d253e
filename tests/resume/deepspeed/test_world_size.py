"""A checkpoint of ZeRO 1-3 resumes at another world size.

Protocol
1. a run of ``saved`` ranks trains and saves; its state is taken by parameter name, whatever the partitioning;
2. a freshly seeded engine of ``loaded`` ranks loads: that state is the save's, bit for bit, on every rank;
3. its further steps are those of a new run at ``loaded`` ranks that was given the state by hand.
"""

from __future__ import annotations

import glob
import os

import pytest
import torch

from resume import oracle, symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import variant
from resume.deepspeed.world_size import Case
from resume.symptoms import crash

REFUSED = crash("ZeRORuntimeException", "DP world size")
SUB_GROUPS = (("sub_group_size", 40),)  # 1 to 3 parameters each, and not the same at every world size

CASES = [
    Case(1, 2, Cell("bf16", 1)),
    Case(2, 1, Cell("fp16", 1, scheduler=True)),
    Case(2, 1, Cell("bf16", 1, grad_accum="fp32")),
    Case(1, 3, Cell("bf16", 1, grad_accum="fp32"), frozen=True),
    Case(2, 1, Cell("bf16", 2), zero=(("round_robin_gradients", True),)),
    Case(2, 3, Cell("fp32", 2), frozen=True),
    Case(1, 2, Cell("fp16", 3), frozen=True),
    Case(2, 1, Cell("bf16", 3), frozen=True, zero=SUB_GROUPS),
    Case(3, 2, Cell("fp32", 3), zero=SUB_GROUPS),
]


def of(function: str) -> str:
    return f"resume.deepspeed.world_size:{function}"


@pytest.mark.fault("world-size-change", symptom=REFUSED)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_resume_at_another_world_size(pools, tmp_path, case):
    saved = pools(case.saved).run(of("train_and_save"), case=case, folder=str(tmp_path))[0]
    resumed = pools(case.loaded).run(of("resume"), case=case, folder=str(tmp_path))
    oracle.check([saved] * case.loaded, [r["loaded"] for r in resumed], what="after the load")
    reference = pools(case.loaded).run(of("reference"), case=case, saved=saved)
    finals = [r["final"] for r in resumed]
    if oracle.moved([saved] * case.loaded, finals) < 1e-3:
        raise AssertionError("training on does not move the weights: it cannot show anything")
    oracle.check(reference, finals, what="training on", as_symptom=dict.fromkeys(oracle.KINDS, symptoms.Diverged))
