"""What becomes of a patch in a release: decided by what its fault's tests did there; text only says how to carry it.

`Affects:` is never read here: it is a claim, and the gate is what checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from carry.signals import APPLIES, OFFSET, Signals

CARRY, REBASE, DROP, FIX, UNDECIDED = "carry", "rebase", "drop", "fix", "undecided"
SAMPLE = 6  # tests of a fault that have a say, unless they would all have its patch dropped: then every test has

# test id -> what a run of the tests recorded: outcome (red, green or error), symptom, message
Run = Mapping[str, Mapping]


class Verdict(NamedTuple):
    """`name` is carry, rebase, drop, fix or undecided; `reason` is one sentence with its evidence."""

    name: str
    reason: str


@dataclass(frozen=True)
class Behaviour:
    """The runs of one fault's tests on the pristine and on the patched release, in order; none: not run.

    `problem` says why there is no run where there should be.
    """

    pristine: tuple[Run, ...] = ()
    patched: tuple[Run, ...] = ()
    problem: str = ""


def flaky(runs: tuple[Run, ...]) -> bool:
    """Whether a test changed its outcome from one run to another."""
    seen: dict[str, set[str]] = {}
    for run in runs:
        for name, test in run.items():
            seen.setdefault(name, set()).add(test["outcome"])
    return any(len(outcomes) > 1 for outcomes in seen.values())


def shows(pristine: tuple[Run, ...]) -> bool | None:
    """Whether the fault shows on the pristine release: some test has the declared symptom, or none has and most pass.

    None where neither holds. Another fault can get in the way of a few tests, and that alone does not make this one.
    """
    outcomes = [test["outcome"] for test in _largest(pristine).values()]
    if any(test["outcome"] == "red" for run in pristine for test in run.values()):
        return True
    return False if outcomes.count("green") > outcomes.count("error") else None


def works(behaviour: Behaviour) -> bool | None:
    """Whether the tests pass on the patched release, those aside that something else stops on both; None: not run."""
    if not any(behaviour.patched):
        return None
    before = _largest(behaviour.pristine)
    outcomes = [
        test["outcome"]
        for run in behaviour.patched
        for name, test in run.items()
        if {test["outcome"], before.get(name, {}).get("outcome")} != {"error"}
    ]
    return bool(outcomes) and set(outcomes) == {"green"}


def _largest(runs: tuple[Run, ...]) -> Run:
    """The run with the most tests: all of the fault's, where a sample was not enough."""
    return max(runs, key=len, default={})


def counted(runs: tuple[Run, ...]) -> str:
    """Such as `red 4, green 2 of 6`, of the run with the most tests."""
    run = _largest(runs)
    outcomes = [test["outcome"] for test in run.values()]
    parts = [f"{word} {outcomes.count(word)}" for word in ("red", "green", "error") if word in outcomes]
    return f"{', '.join(parts)} of {len(outcomes)}" if parts else "not run"


def needed(behaviour: Behaviour) -> bool | None:
    """Whether the release has the fault; None where its tests do not tell.

    Tests that fail with another symptom than the declared one count where the patch makes them pass.
    """
    there = shows(behaviour.pristine)
    return True if there is None and works(behaviour) else there


def expected(signals: Signals) -> bool | None:
    """Whether the text alone would call the patch needed; None where it says nothing either way."""
    if signals.in_already:
        return False
    return True if signals.carried else None


def disagrees(signals: Signals, behaviour: Behaviour) -> bool:
    """Whether behaviour contradicts the text, so that its tests have to be run once more."""
    text, seen = expected(signals), needed(behaviour)
    broken = signals.carried and works(behaviour) is False
    return broken or (text is not None and seen is not None and text != seen)


def decide(signals: Signals, behaviour: Behaviour) -> Verdict:
    """The verdict on one patch. Behaviour outranks text."""
    before, after = counted(behaviour.pristine), counted(behaviour.patched)
    text = ", ".join(signals.words)
    for where, runs in (("pristine", behaviour.pristine), ("patched", behaviour.patched)):
        if flaky(runs):
            return Verdict(UNDECIDED, f"flaky: its tests changed their outcome between two runs on the {where} release")
    if not any(behaviour.pristine):
        return Verdict(UNDECIDED, behaviour.problem or "no test of it ran")
    seen, other = needed(behaviour), _other_symptom(behaviour.pristine)
    if seen is None:
        return Verdict(UNDECIDED, f"its tests fail, but not with the declared symptom ({before}){other}")
    if not seen:
        return Verdict(DROP, f"not needed: on the release as it is no test shows it ({before}){other}; text: {text}")
    if not signals.carried:
        what = "needed, but nothing of it is left to apply" if signals.empty else f"needed, but {text}"
        return Verdict(FIX, f"{what}: pristine {before}")
    fixed = works(behaviour)
    if fixed is None:
        return Verdict(UNDECIDED, behaviour.problem or "its tests did not run on the patched release")
    other = _other_symptom(behaviour.patched)
    if not fixed:
        return Verdict(FIX, f"needed, goes on ({text}), but no longer works: patched {after}{other}")
    name = CARRY if signals.text in (APPLIES, OFFSET) else REBASE
    return Verdict(name, f"needed, and works ({text}): pristine {before}, patched {after}{other}")


def _other_symptom(runs: tuple[Run, ...]) -> str:
    """What the first error of the runs says, after a colon; empty where there is none."""
    for test in _largest(runs).values():
        if test["outcome"] == "error":
            said = " ".join(f"{test.get('symptom') or ''}: {test.get('message') or ''}".split())
            return f", other symptom: {said[:160]}"
    return ""
