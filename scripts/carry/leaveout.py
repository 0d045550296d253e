"""Leave one out: a series without one of its patches, which then its own tests miss and nobody else's.

A patch that cannot go on, or does not work, without another names it in a `Depends:` trailer and is left out with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from carry.behaviour import observe
from carry.errors import UserError
from carry.lock import locked
from carry.patches import Patch, load_series
from carry.paths import House
from carry.pins import Pin
from carry.progress import say
from carry.report import replace_bytes, replace_text
from carry.signals import Prepared, Signals, prepare, probe, write_series
from carry.verdicts import Run


@dataclass(frozen=True)
class LeftOut:
    """A series without `patch` and those that declare to need it (`with_it`).

    `stuck`: signals of others that do not go on any more. `own`: the tests of `patch`, empty where they were not run.
    `others`: fault -> its tests, for those of which some test is not green.
    """

    patch: Patch
    with_it: tuple[str, ...]
    stuck: tuple[Signals, ...] = ()
    own: Run = field(default_factory=dict)
    others: dict[str, Run] = field(default_factory=dict)

    def findings(self) -> list[str]:
        """What is not as it should be; one line each."""
        fault, found = self.patch.fault, []
        for signals in self.stuck:
            at = f" (line {signals.conflict.patch_line})" if signals.conflict else ""
            found.append(f"{signals.patch.path.name}{at} does not go on without {fault}: declare `Depends: {fault}`")
        green = [name for name, test in self.own.items() if test["outcome"] == "green"]
        if self.own and len(green) == len(self.own):
            found.append(
                f"{self.patch.path.name}: all {len(green)} tests of {fault} pass without it, so nothing shows its use"
            )
        for other, run in self.others.items():
            bad = [name for name, test in run.items() if test["outcome"] != "green"]
            found.append(
                f"{other}: {len(bad)} of {len(run)} tests fail without {fault}, {bad[0]} for one: "
                f"declare `Depends: {fault}`"
            )
        return found

    def line(self) -> str:
        """For the table: the fault, what its own tests did, how many others failed, and what was left out with it."""
        outcomes = [test["outcome"] for test in self.own.values()]
        own = ", ".join(f"{word} {outcomes.count(word)}" for word in ("red", "error", "green") if word in outcomes)
        more = f"  with {', '.join(self.with_it)}" if self.with_it else ""
        stuck = f"  stuck: {', '.join(s.patch.fault for s in self.stuck)}" if self.stuck else ""
        return f"{self.patch.fault:28}  {own or 'not run':22}  others failing: {len(self.others)}{more}{stuck}"


def dependents(series: Sequence[Patch], fault: str) -> tuple[str, ...]:
    """Faults whose patches declare, directly or through others, to need the patch of `fault`; in order."""
    found = {fault}
    for patch in series:  # a patch can only need an earlier one
        if found & set(patch.depends):
            found.add(patch.fault)
    return tuple(patch.fault for patch in series if patch.fault in found and patch.fault != fault)


def leave_out(house: House, pin: Pin, faults: Iterable[str] = (), *, run: bool = True, whole: bool = False):
    """A LeftOut of each of `faults` (all of the series by default), as they are done.

    `run`: run the tests of the fault itself; `whole`: those of all others too. Raises as `observe`.
    """
    series = load_series(pin)
    wanted = list(faults) or [patch.fault for patch in series]
    with locked(house.build, "carry leave-one-out", say):
        prepared = prepare(house, pin)
    for number, fault in enumerate(wanted, 1):
        say(f"{pin} without {fault} ({number} of {len(wanted)})")
        yield _leave_out(house, pin, prepared, fault, run, whole)


def _leave_out(house: House, pin: Pin, prepared: Prepared, fault: str, run: bool, whole: bool) -> LeftOut:
    patch = next(p for p in prepared.series if p.fault == fault)
    with_it = dependents(prepared.series, fault)
    keep = {p.fault for p in prepared.series} - {fault, *with_it}
    folder = house.build / "leave-one-out" / f"{pin.upstream.name}-{pin.version}"
    with locked(house.build, "carry leave-one-out", say):
        probed = probe(house, pin, prepared, keep=keep)
        stuck = tuple(s for s in probed.signals if s.patch.fault in keep and not s.carried)
        rest = write_series(probed, replace(pin, folder=folder), folder) if run and not stuck else ()
    if not rest:
        return LeftOut(patch, with_it, stuck)
    runs = observe(house, pin, rest, pin.stacks[0], [fault, *(sorted(keep) if whole else ())])
    own = runs.pop(fault)
    others = {name: one for name, one in runs.items() if any(test["outcome"] != "green" for test in one.values())}
    return LeftOut(patch, with_it, (), own, others)


def chosen(pins: Iterable[Pin], fault: str = "") -> list[tuple[Pin, list[str]]]:
    """Each pin with the faults to leave out: all of its series, or the one asked for where the series has it.

    Raises UserError where no series has it.
    """
    every = [(pin, [patch.fault for patch in load_series(pin)]) for pin in pins]
    if not fault:
        return every
    found = [(pin, [fault]) for pin, faults in every if fault in faults]
    if not found:
        known = ", ".join(sorted({name for _, faults in every for name in faults})) or "none"
        raise UserError(f"no fault {fault!r} in the series asked for; there is: {known}")
    return found


def declare(results: Sequence[LeftOut]) -> list[Path]:
    """Write a `Depends:` trailer for everything that was stuck, but where another one says it already through a
    third patch; the patch files changed. A refreshed work tree keeps them, so make it anew."""
    stuck = {one.patch.fault: {s.patch.fault for s in one.stuck} for one in results}
    patches = {s.patch.fault: s.patch for one in results for s in one.stuck}
    changed = []
    for fault, patch in patches.items():
        needs = [other for other, those in stuck.items() if fault in those]
        direct = [n for n in needs if not any(n != third and third in stuck.get(n, ()) for third in needs)]
        lines = patch.path.read_bytes().split(b"\n")
        at = next(trailer.line for trailer in patch.trailers if trailer.key == "Fault")
        lines[at:at] = [f"Depends: {name}".encode() for name in direct]
        replace_bytes(patch.path, b"\n".join(lines))
        changed.append(patch.path)
    return changed


def write(house: House, pin: Pin, results: Sequence[LeftOut]) -> Path:
    """Per fault what was left out with it, its tests' outcomes and the findings, as JSON below dist/leave-one-out/."""
    found = [
        {
            "fault": one.patch.fault,
            "with": list(one.with_it),
            "own": {name: test["outcome"] for name, test in one.own.items()},
            "findings": one.findings(),
        }
        for one in results
    ]
    path = house.dist / "leave-one-out" / f"{pin.upstream.name}-{pin.version}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({"pin": str(pin), "left_out": found}, indent=1) + "\n")
    return path
