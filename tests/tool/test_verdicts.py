"""Verdicts from made signals and runs: behaviour outranks text."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from carry import verdicts
from carry.patches import Patch
from carry.signals import Conflict, Signals
from carry.verdicts import Behaviour, counted, decide, disagrees, flaky, needed, shows, works

PATCH = Patch(Path("0001-x.patch"), "x", (), (), (), "0" * 64)
CONFLICT = Conflict(30, "toy/core.py", 20, "lines")


def signals(text: str = "applies", **more) -> Signals:
    made = {"reverse_applies": False, "empty": False, "conflict": None, "gone": (), "uncalled": ()}
    return Signals(PATCH, text, **made | more)


def run(**outcomes: str) -> dict:
    return {name: {"outcome": outcome, "symptom": "S", "message": "why"} for name, outcome in outcomes.items()}


RED, GREEN, ERROR = run(a="red"), run(a="green"), run(a="error")
IN = {"text": "conflict", "reverse_applies": True, "empty": True}


@pytest.mark.parametrize(
    ("text", "pristine", "patched", "name", "words"),
    [
        ({}, [RED], [GREEN], "carry", "needed, and works (applies): pristine red 1 of 1, patched green 1 of 1"),
        ({"text": "offset"}, [RED], [GREEN], "carry", "works (offset)"),
        ({"text": "three-way"}, [RED], [GREEN], "rebase", "works (three-way)"),
        # behaviour says upstream has it, whatever the text says
        (IN, [GREEN], [], "drop", "not needed: on the release as it is no test shows it (green 1 of 1)"),
        ({}, [GREEN, GREEN], [], "drop", "text: applies"),
        ({"text": "conflict", "conflict": CONFLICT}, [GREEN], [], "drop", "text: conflict"),
        # and that it does not
        (IN, [RED, RED], [], "fix", "needed, but nothing of it is left to apply"),
        ({"text": "conflict", "conflict": CONFLICT}, [RED], [], "fix", "needed, but conflict: pristine red 1 of 1"),
        ({"text": "file gone"}, [RED], [], "fix", "needed, but file gone"),
        ({}, [RED], [RED, RED], "fix", "goes on (applies), but no longer works: patched red 1 of 1"),
        ({}, [RED], [ERROR], "fix", "no longer works: patched error 1 of 1"),
        # one cell with the fault is enough for it to be needed
        ({}, [run(a="green", b="red")], [run(a="green", b="green")], "carry", "pristine red 1, green 1 of 2"),
        ({}, [run(a="red", b="error")], [run(a="green", b="green")], "carry", "pristine red 1, error 1 of 2"),
        # another symptom than the declared one counts where the patch ends it
        ({}, [ERROR], [GREEN], "carry", "pristine error 1 of 1"),
        ({}, [ERROR], [ERROR], "undecided", "not with the declared symptom (error 1 of 1), other symptom: S: why"),
        ({"text": "conflict", "conflict": CONFLICT}, [ERROR], [], "undecided", "not with the declared symptom"),
        # what something else stops, patched or not, says nothing of this fault
        ({}, [run(a="red", b="error")], [run(a="green", b="error")], "carry", "patched green 1, error 1 of 2, other s"),
        ({}, [run(a="red", b="green")], [run(a="green", b="error")], "fix", "longer works: patched green 1, error 1"),
        ({}, [run(a="green", b="green", c="error")], [], "drop", "(green 2, error 1 of 3), other symptom: S: why"),
        ({}, [run(a="green", b="error")], [], "undecided", "not with the declared symptom (green 1, error 1 of 2)"),
        ({}, [RED, GREEN], [GREEN], "undecided", "flaky: its tests changed their outcome between two runs on the pr"),
        ({}, [RED], [RED, GREEN], "undecided", "between two runs on the patched release"),
        ({}, [], [], "undecided", "no test of it ran"),
        ({}, [{}], [], "undecided", "no test of it ran"),
        ({}, [RED], [], "undecided", "did not run on the patched release"),
    ],
)  # fmt: skip
def test_verdict(text, pristine, patched, name, words):
    found = decide(signals(**text), Behaviour(tuple(pristine), tuple(patched)))
    assert found.name == name
    assert words in found.reason


def test_a_problem_is_the_reason():
    assert decide(signals(), Behaviour(problem="no stack fits")).reason == "no stack fits"


@pytest.mark.parametrize(
    ("text", "pristine", "patched", "again"),
    [
        ({}, [RED], [GREEN], False),
        ({}, [GREEN], [], True),
        ({}, [RED], [RED], True),
        ({}, [RED], [ERROR], True),
        (IN, [GREEN], [], False),
        (IN, [RED], [], True),
        ({"text": "conflict"}, [RED], [], False),
        ({"text": "conflict"}, [GREEN], [], False),
        ({}, [ERROR], [], False),
    ],
)
def test_what_contradicts_the_text_is_run_again(text, pristine, patched, again):
    assert disagrees(signals(**text), Behaviour(tuple(pristine), tuple(patched))) is again


def test_states_and_counts():
    assert [flaky(runs) for runs in ((), (RED,), (RED, RED), (RED, GREEN))] == [False, False, False, True]
    # a run of all tests and one of a sample of them agree where they meet
    assert not flaky((run(a="green", b="red"), GREEN))
    assert counted((GREEN, run(a="green", b="red"))) == "red 1, green 1 of 2" and counted(()) == "not run"
    assert [shows((one,)) for one in (RED, GREEN, ERROR, {})] == [True, False, None, None]
    assert [works(Behaviour((RED,), patched)) for patched in ((), (GREEN,), (ERROR,))] == [None, True, False]
    assert works(Behaviour((ERROR,), (ERROR,))) is False
    assert [needed(Behaviour((ERROR,), patched)) for patched in ((), (GREEN,), (RED,))] == [None, True, None]


def test_no_verdict_reads_what_the_patch_claims():
    assert "affects" not in inspect.getsource(verdicts).replace("`Affects:` is never read here", "").lower()
