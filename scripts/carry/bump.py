"""The gate: what a new release does to every patch of a pin, and the pin that follows from it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from carry import behaviour as lab
from carry.errors import CouldNotRun, FixNeeded, ReviewNeeded, Undecided, UserError
from carry.lock import locked
from carry.patches import Patch, load_series
from carry.paths import House
from carry.pins import Pin, load_pin, load_upstream, versions
from carry.progress import say
from carry.releases import as_pin, choose, offers, pin_below
from carry.signals import Prepared, Probe, Signals, prepare, probe, write_series
from carry.trees import release
from carry.verdicts import (
    CARRY,
    DROP,
    FIX,
    REBASE,
    SAMPLE,
    UNDECIDED,
    Behaviour,
    Verdict,
    decide,
    disagrees,
    flaky,
    needed,
    shows,
    works,
)

ANEW, SHARED, ABSENT, UNKNOWN = "anew", "shared", "absent", "unknown"


@dataclass(frozen=True)
class Judged:
    """A patch of the pin in the new release."""

    patch: Patch
    signals: Signals
    behaviour: Behaviour
    verdict: Verdict


@dataclass(frozen=True)
class Other:
    """A fault that the pin carries no patch for: `standing` is anew (on the pin's own release some of its tests pass
    and none shows it), shared (one does), absent, or unknown; `patch` is the one of the nearest pin that has it."""

    fault: str
    patch: Patch
    standing: str
    behaviour: Behaviour


@dataclass(frozen=True)
class Outcome:
    """What the gate found; `stack` is None, and `problem` says why, where behaviour could not be run."""

    pin: Pin
    target: Pin
    stack: str | None
    sample: int
    judged: tuple[Judged, ...]
    others: tuple[Other, ...]
    problem: str = ""
    series: tuple[Patch, ...] = field(default=(), compare=False)  # of carry and rebase, refreshed

    @property
    def name(self) -> str:
        return f"{self.pin.upstream.name}-{self.pin.version}-{self.target.version}"

    @property
    def exit_code(self) -> int:
        """13 could not run, else 11 fix, 12 undecided, 10 review, or 0 where everything is carried."""
        names = {one.verdict.name for one in self.judged}
        if self.problem:
            return CouldNotRun.exit_code
        if FIX in names:
            return FixNeeded.exit_code
        if UNDECIDED in names:
            return Undecided.exit_code
        anew = any(other.standing == ANEW for other in self.others)
        return ReviewNeeded.exit_code if anew or names & {DROP, REBASE} else 0


def bump(house: House, upstream_name: str, version: str, pin_version: str = "", sample: int | None = None) -> Outcome:
    """Judge every patch of a pin (by default the newest below `version`) against a release, or `latest`.

    Raises UserError for a release that the index does not offer as an sdist and for a pin that is not older,
    CouldNotRun where the index cannot be reached. Writes below build/ only.
    """
    from packaging.version import Version

    upstream = load_upstream(house, upstream_name)
    if not version:
        raise UserError("which release? give VERSION=, such as VERSION=latest")
    sample = checked_sample(sample)
    pin = load_pin(house, upstream_name, pin_version) if pin_version else None
    offer = choose(upstream, offers(upstream), version)
    pin = pin or pin_below(house, upstream, offer.version)
    if pin is None:
        known = ", ".join(versions(house, upstream_name)) or "none"
        raise UserError(f"no pin of {upstream_name} is older than {offer.version}; there is: {known}")
    if Version(pin.version) >= Version(offer.version):
        raise UserError(f"pin {pin.version} is not older than {offer.version}; name an older one with PIN=")
    scratch = house.build / "bump" / f"{upstream_name}-{pin.version}-{offer.version}"
    with locked(house.build, "carry bump", say):
        target = as_pin(house, upstream, offer, (), scratch / "series")
        prepared = prepare(house, pin)
        release(house, target)
        probed = probe(house, target, prepared)
    return _Gate(house, pin, target, prepared, sample).judge(probed)


def checked_sample(sample: int | None) -> int:
    """The number of tests of a fault, SAMPLE where none is given. Raises UserError for one below 0."""
    if sample is None:
        return SAMPLE
    if sample < 0:
        raise UserError(f"{sample} tests of each fault cannot be run; give 1 or more, or 0 for all")
    return sample


class _Gate:
    """One bump in progress."""

    def __init__(self, house: House, pin: Pin, target: Pin, prepared: Prepared, sample: int):
        self.house, self.pin, self.target, self.prepared, self.sample = house, pin, target, prepared, sample
        self.own = [patch.fault for patch in prepared.series]
        self.others = nearest_patches(house, target, without=self.own)
        self.pristine: dict[str, list] = {}
        self.patched: dict[str, list] = {}
        self.stack = ""

    def judge(self, probed: Probe) -> Outcome:
        try:
            self._run_pristine()
            series, probed = self._settle(probed)
        except CouldNotRun as error:
            return self._outcome(probed, (), str(error))
        return self._outcome(probed, series)

    def _run_pristine(self) -> None:
        faults = [*self.own, *self.others]
        stacks = lab.candidate_stacks(self.house, self.target, self.pin)
        self.stack, runs = lab.pristine(self.house, self.target, stacks, faults, self.sample)
        # a patch is dropped on the word of all its fault's tests, not of a sample
        doubtful = {fault: runs[fault] for fault in self.own if not shows((runs[fault],))}
        runs |= lab.in_full(self.house, self.target, self.stack, doubtful, self.sample)
        self.pristine = {fault: [run] for fault, run in runs.items()}

    def _settle(self, probed: Probe) -> tuple[tuple[Patch, ...], Probe]:
        """The refreshed series of all that is needed and works, tested as a whole, and its probe."""
        wanted = {fault for fault in self.own if shows(tuple(self.pristine[fault])) is not False}
        while True:
            with locked(self.house.build, "carry bump", say):
                probed = probe(self.house, self.target, self.prepared, keep=wanted)
                series = write_series(probed, self.target, self.target.folder)
            laid = [patch.fault for patch in series]
            runs = self._observe(series, laid) if series else {}
            self.patched.update({fault: [run] for fault, run in runs.items()})
            self._repeat(probed, series)
            failed = {fault for fault in laid if not self._good(fault)}
            if not failed:
                return series, probed
            wanted -= failed  # what is left has to be right without them

    def _good(self, fault: str) -> bool:
        seen = self._behaviour(fault)
        return bool(works(seen)) and not flaky(seen.pristine) and not flaky(seen.patched)

    def _repeat(self, probed: Probe, series: tuple[Patch, ...]) -> None:
        """Run again what contradicts the text, once."""
        odd = [s.patch.fault for s in probed.signals if disagrees(s, self._behaviour(s.patch.fault))]
        again = [fault for fault in odd if len(self.pristine[fault]) == 1]
        for fault, run in (self._observe((), again, attempt=2) if again else {}).items():
            self.pristine[fault].append(run)
        laid = {patch.fault for patch in series}
        again = [fault for fault in odd if fault in laid and len(self.patched[fault]) == 1]
        for fault, run in (self._observe(series, again, attempt=2) if again else {}).items():
            self.patched[fault].append(run)

    def _observe(self, series: tuple[Patch, ...], faults: Iterable[str], **how):
        how.setdefault("sample", self.sample)
        return lab.observe(self.house, self.target, series, self.stack, faults, **how)

    def _behaviour(self, fault: str, problem: str = "") -> Behaviour:
        return Behaviour(tuple(self.pristine.get(fault, ())), tuple(self.patched.get(fault, ())), problem)

    def _outcome(self, probed: Probe, series: tuple[Patch, ...], problem: str = "") -> Outcome:
        judged = []
        for signals in probed.signals:
            seen = self._behaviour(signals.patch.fault, problem)
            judged.append(Judged(signals.patch, signals, seen, decide(signals, seen)))
        others = [self._other(fault, patch) for fault, patch in self.others.items()]
        return Outcome(
            self.pin, self.target, self.stack or None, self.sample, tuple(judged), tuple(others), problem, series
        )

    def _other(self, fault: str, patch: Patch) -> Other:
        seen = self._behaviour(fault)
        there = needed(seen)
        if not there:
            return Other(fault, patch, UNKNOWN if there is None else ABSENT, seen)
        try:
            runs = lab.observe(self.house, self.pin, (), self.pin.stacks[0], [fault], sample=self.sample)
        except (CouldNotRun, UserError) as error:
            say(f"{fault} on the pristine {self.pin}: {error}")
            return Other(fault, patch, UNKNOWN, seen)
        outcomes = {test["outcome"] for test in runs[fault].values()}
        standing = SHARED if "red" in outcomes else ANEW if "green" in outcomes else UNKNOWN
        return Other(fault, patch, standing, seen)


def nearest_patches(house: House, target: Pin, without: Iterable[str] = ()) -> dict[str, Patch]:
    """fault -> its patch in the newest pin at or below the release, else in the oldest one above; all pins together."""
    from packaging.version import Version

    limit = Version(target.version)
    known = [(Version(version), version) for version in versions(house, target.upstream.name)]
    below, above = ([v for v in known if (v[0] <= limit) == side] for side in (True, False))
    found: dict[str, Patch] = {}
    for _, version in [*sorted(below, reverse=True), *sorted(above)]:
        for patch in load_series(load_pin(house, target.upstream.name, version)):
            if patch.fault not in without:
                found.setdefault(patch.fault, patch)
    return found


def write_pin(house: House, outcome: Outcome) -> Path:
    """The new pin's folder: pin.toml, with what is left out and why, and the refreshed patches; all or nothing.

    Raises UserError where the folder is there already, CouldNotRun where behaviour was not run.
    """
    target = outcome.target
    dest = target.upstream.folder / target.version
    shown = house.relative(dest)
    if dest.exists():
        raise UserError(f"{shown} is there already and stays as it is; remove it to have it laid down anew")
    if outcome.problem:
        raise CouldNotRun(f"{shown} is not written: {outcome.problem}")
    # the lock: other commands sweep away scratch that nobody holds
    with (
        locked(house.build, "carry bump", say),
        tempfile.TemporaryDirectory(dir=target.upstream.folder, prefix=".bump-") as scratch,
    ):
        new = Path(scratch) / "pin"  # one level down: a folder with a pin.toml beside the others would be a pin
        new.mkdir(mode=0o755)
        (new / "pin.toml").write_text(_pin_toml(outcome), encoding="utf-8")
        for patch in outcome.series:
            (new / patch.path.name).write_bytes(_with_version(patch, target.version))
        os.rename(new, dest)
    return dest


def _pin_toml(outcome: Outcome) -> str:
    target = outcome.target
    lines = [f"# Laid down by `carry bump` from {outcome.pin.version}, tested in {outcome.stack}."]
    left = [one for one in outcome.judged if one.verdict.name not in (CARRY, REBASE)]
    lines += [f"# Left out: {one.patch.fault}: {one.verdict.name}: {_line(one.verdict.reason)}" for one in left]
    there = [other for other in outcome.others if needed(other.behaviour)]
    lines += [f"# Not carried: {other.fault}: the release has it ({other.standing})" for other in there]
    lines += [
        f'version = "{target.version}"',
        f'sdist = "{target.sdist}"',
        f'sha256 = "{target.sha256}"',
        f'tag = "{target.tag}"',
        "revision = 1",
        f'stacks = ["{outcome.stack}"]',
    ]
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    return " ".join(text.split())


def _with_version(patch: Patch, version: str) -> bytes:
    """The patch file; where its Affects trailers leave the release out, which was measured to have the fault, with one
    more that names it."""
    from packaging.specifiers import SpecifierSet

    data = patch.path.read_bytes()
    ranges = [trailer for trailer in patch.trailers if trailer.key == "Affects"]
    if not ranges or any(SpecifierSet(trailer.value).contains(version) for trailer in ranges):
        return data
    lines = data.split(b"\n")
    lines.insert(ranges[-1].line, f"Affects: =={version}".encode())
    return b"\n".join(lines)
