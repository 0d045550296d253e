"""``load_from_fp32_weights``: what its description in ``zero/config.py`` promises is what every kind of load does.

The description is read as a reader would: a sentence that says that something "always" uses, ignores or
initializes takes that kind of load out of the setting's reach; everything else is in it.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import re

import pytest
import torch

from resume import oracle, symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import ANY_LOAD, BOTH, MODULE_ONLY, NOOPT, RELEASE, Story, loads, variant
from resume.deepspeed.test_fresh_optimizer import remove_optimizer_files
from resume.symptoms import crash

FP32, LOW = "the fp32 copies", "the 16-bit weights"
# <= 0.12 refreshes no masters in loads without optimizer states
OLD = RELEASE <= (0, 12)


def description() -> str:
    """The text under ``load_from_fp32_weights`` in the installed ``deepspeed/runtime/zero/config.py``."""
    package = os.path.dirname(importlib.util.find_spec("deepspeed").origin)
    with open(os.path.join(package, "runtime", "zero", "config.py")) as file:
        tree = ast.parse(file.read())
    for body in (node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and field.target.id == "load_from_fp32_weights":
                return " ".join(text.value.value.split())
    raise LookupError("load_from_fp32_weights has no description")


def promised(text: str, cell: Cell, load: dict) -> str:
    """Where ``text`` says that the masters of this load come from: ``FP32`` or ``LOW``."""
    for clause in re.split(r"[.;] ", text):
        if not re.search(r"\balways\b|\bno effect\b|\bignore", clause):
            continue
        if load and re.search(r"load_optimizer_states=False", clause):
            return LOW
        if not load and re.search(r"load_optimizer_states", clause) is None and covers(clause, cell):
            return FP32
    return FP32 if cell.load_from_fp32 is not False else LOW


def covers(clause: str, cell: Cell) -> bool:
    """Whether a clause speaks of training like ``cell``."""
    if cell.stage == 3:
        return "stage 3" in clause
    if cell.stage == 0:
        if cell.grad_accum is not None and "other training" in clause:  # than that whose gradients accumulate in fp32
            return False
        return f"{cell.precision} without ZeRO" in clause or "training without ZeRO" in clause
    return False


def source(loaded, saved) -> str:
    """Where the masters that a load left behind come from."""
    low = {n: w.float() for n, w in loaded.weights.items()}
    if all(torch.equal(saved.masters[n], low[n]) for n in low):
        raise AssertionError("the saved masters are no better than the weights: the two cannot be told apart")
    for name, expected in ((FP32, saved.masters), (LOW, low)):
        if all(torch.equal(loaded.masters[n], expected[n]) for n in expected):
            return name
    return "neither the fp32 copies nor the 16-bit weights"


def check(pools, cell: Cell, folder, load: dict) -> None:
    story = Story(pools, cell, folder).train_and_save()
    expected = promised(description(), cell, load)
    for rank, (result, saved) in enumerate(zip(story.resume(load), story.saved, strict=True)):
        found = source(result["loaded"], saved)
        if found != expected:
            raise symptoms.TextDisagrees(
                f"rank {rank}: the description promises masters from {expected}, found {found}"
            )


def ids(some) -> list:
    return [pytest.param(cell, load, id=f"{cell.id}-{NAMES[id(load)]}") for cell, load in some]


def misdocumented(symptom):
    """The mark of a test of ``load-from-fp32-misdocumented``."""
    return pytest.mark.fault("load-from-fp32-misdocumented", symptom=symptom)


def right(cell: Cell):
    """The mark of a test of what every description says: a guard, unless the release loads nothing at all."""
    if loads(cell):
        return pytest.mark.guard
    return pytest.mark.fault("bf16-accum-any-load" if cell.grad_accum else "bf16-stage0-any-load", symptom=ANY_LOAD)


FULL: dict = {}
NAMES = {id(FULL): "full", id(NOOPT): "noopt", id(MODULE_ONLY): "module-only", id(BOTH): "both"}
HALVES = [(p, w) for p in ("bf16", "fp16") for w in (1, 2)]
# BF16_Optimizer; at stage 0 it is the default up to 0.16, and not to be had after 0.17
SPLIT = [Cell("bf16", s, w, grad_accum="fp32") for s in ((0, 1) if RELEASE == (0, 17) else (1,)) for w in (1, 2)]
ZERO12 = [Cell(p, s, w) for p, w in HALVES for s in (1, 2)]
ZERO3 = [Cell(p, 3, w) for p, w in HALVES]
PLAIN = [Cell(p, 0, w) for p, w in HALVES]


def told(some, flag: bool) -> list[Cell]:
    return [variant(cell, load_from_fp32=flag) for cell in some]


WRONG = [(c, FULL) for c in told(SPLIT + ZERO3 + PLAIN, False)]
WRONG += [(c, load) for c in told(SPLIT + ZERO12 + ZERO3, True) for load in (NOOPT, BOTH)]
RIGHT = [(c, FULL) for c in told(SPLIT + ZERO12 + ZERO3 + PLAIN, True) + told(ZERO12, False)]
if not OLD:
    WRONG += [(c, MODULE_ONLY) for c in told(SPLIT + ZERO12, True)]
    RIGHT += [(c, load) for c in told(SPLIT + ZERO12 + ZERO3, False) for load in (NOOPT, BOTH)]


@pytest.mark.parametrize(
    "cell, load",
    [
        pytest.param(
            *p.values, id=p.id, marks=misdocumented(symptoms.TextDisagrees if loads(p.values[0]) else ANY_LOAD)
        )
        for p in ids(WRONG)
    ],
)
def test_masters_come_from_where_the_description_says(pools, tmp_path, cell, load):
    check(pools, cell, tmp_path, load)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, id=c.id, marks=misdocumented(symptoms.MastersStale if loads(c) else ANY_LOAD))
        for c in told(SPLIT, False)
    ],
)
def test_bf16_optimizer_takes_masters_from_the_loaded_weights(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    loaded = [r["loaded"] for r in story.resume()]
    oracle.check_masters_follow_weights(loaded, "after the load")
    oracle.check(story.saved, loaded, only={"weights", "moments", "step", "groups", "counters"}, what="after the load")


@pytest.mark.parametrize("cell, load", [pytest.param(*p.values, id=p.id, marks=right(p.values[0])) for p in ids(RIGHT)])
def test_masters_come_from_where_every_description_says(pools, tmp_path, cell, load):
    check(pools, cell, tmp_path, load)


@misdocumented(symptoms.TextDisagrees)
@pytest.mark.parametrize("flag", (True, False))
@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=c.id) for c in SPLIT + ZERO12 + ZERO3 if c.precision == "bf16" and loads(c)]
)
def test_no_promise_for_missing_optimizer_state(pools, tmp_path, cell, flag):
    """The description says "even when checkpoint is missing optimizer state", of a load that then fails."""
    cell = variant(cell, load_from_fp32=flag)
    story = Story(pools, cell, tmp_path).train_and_save()
    remove_optimizer_files(tmp_path)
    outcomes = story.ranks.outcomes("resume.deepspeed.runs:resume", cell=cell, folder=story.folder, load=FULL)
    failed = [o for o in outcomes if isinstance(o, symptoms.Symptom)]
    if re.search(r"even when (the )?checkpoint is missing optimizer state", description()) and failed:
        raise symptoms.TextDisagrees(f"the description promises a load without optimizer state, found {failed[0]}")
    for outcome in failed:
        if not crash("FileNotFoundError").matches(outcome):
            raise outcome
