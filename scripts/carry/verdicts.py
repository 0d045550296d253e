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


def state(runs: tuple[Run, ...]) -> str:
    """red (some test has the symptom), green (all pass), error (neither), flaky (runs differ), none (no test ran)."""
    if not runs or not runs[0]:
        return "none"
    outcomes = [{name: test["outcome"] for name, test in run.items()} for run in runs]
    shared = set(outcomes[0]).intersection(*outcomes[1:])
    if any(run[name] != outcomes[0][name] for run in outcomes[1:] for name in shared):
        return "flaky"
    seen = {outcome for run in outcomes for outcome in run.values()}
    return "red" if "red" in seen else "green" if seen == {"green"} else "error"


def counted(runs: tuple[Run, ...]) -> str:
    """Such as `red 4, green 2 of 6`, of the run with the most tests."""
    run = max(runs, key=len, default={})
    outcomes = [test["outcome"] for test in run.values()]
    parts = [f"{word} {outcomes.count(word)}" for word in ("red", "green", "error") if word in outcomes]
    return f"{', '.join(parts)} of {len(outcomes)}" if parts else "not run"


def needed(behaviour: Behaviour) -> bool | None:
    """Whether the release has the fault; None where its tests do not tell.

    Tests that fail with another symptom than the declared one count where the patch makes them pass.
    """
    pristine, patched = state(behaviour.pristine), state(behaviour.patched)
    if pristine == "red" or (pristine == "error" and patched == "green"):
        return True
    return False if pristine == "green" else None


def expected(signals: Signals) -> bool | None:
    """Whether the text alone would call the patch needed; None where it says nothing either way."""
    if signals.in_already:
        return False
    return True if signals.carried else None


def disagrees(signals: Signals, behaviour: Behaviour) -> bool:
    """Whether behaviour contradicts the text, so that its tests have to be run once more."""
    text, seen = expected(signals), needed(behaviour)
    broken = signals.carried and state(behaviour.patched) in ("red", "error")
    return broken or (text is not None and seen is not None and text != seen)


def decide(signals: Signals, behaviour: Behaviour) -> Verdict:
    """The verdict on one patch. Behaviour outranks text."""
    pristine, patched = state(behaviour.pristine), state(behaviour.patched)
    before, after = counted(behaviour.pristine), counted(behaviour.patched)
    text = ", ".join(signals.words)
    if "flaky" in (pristine, patched):
        where = "pristine" if pristine == "flaky" else "patched"
        return Verdict(UNDECIDED, f"flaky: its tests changed their outcome between two runs on the {where} release")
    if pristine == "none":
        return Verdict(UNDECIDED, behaviour.problem or "no test of it ran")
    if pristine == "green":
        return Verdict(DROP, f"not needed: the release as it is passes its tests ({before}); text: {text}")
    seen = needed(behaviour)
    if seen is None:
        return Verdict(UNDECIDED, f"its tests fail, but not with the declared symptom ({before}): {_said(behaviour)}")
    if not signals.carried:
        what = "needed, but nothing of it is left to apply" if signals.empty else f"needed, but {text}"
        return Verdict(FIX, f"{what}: pristine {before}")
    if patched == "none":
        return Verdict(UNDECIDED, behaviour.problem or "its tests did not run on the patched release")
    if patched != "green":
        return Verdict(FIX, f"needed, goes on ({text}), but no longer works: patched {after}")
    name = CARRY if signals.text in (APPLIES, OFFSET) else REBASE
    return Verdict(name, f"needed, and works ({text}): pristine {before}, patched {after}")


def _said(behaviour: Behaviour) -> str:
    for test in behaviour.pristine[-1].values():
        if test["outcome"] == "error":
            return " ".join(f"{test.get('symptom') or ''}: {test.get('message') or ''}".split())[:200]
    return ""
