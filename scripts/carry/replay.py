"""The set carried through every release of an upstream, in order: per fault, where its patch applies and where it is
needed, and what that says of the text signals and of the `Affects:` trailers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from carry import behaviour as lab
from carry.bump import checked_sample, nearest_patches
from carry.errors import CouldNotRun, UserError
from carry.lock import locked
from carry.patches import Patch, load_series
from carry.paths import House
from carry.pins import Pin, all_pins, load_pin, load_upstream
from carry.progress import say
from carry.releases import as_pin, between, offers
from carry.signals import Prepared, Signals, prepare, probe
from carry.sources import fetch, sdist_path
from carry.trees import release
from carry.verdicts import Behaviour, Run, needed

ALL = "all"
_FETCHERS = 4


@dataclass(frozen=True)
class Point:
    """One fault in one release: the text signals of its patch, and its tests' run there (None: not run)."""

    version: str
    fault: str
    signals: Signals
    run: Run | None

    @property
    def needed(self) -> bool | None:
        """Whether the release has the fault, by its tests; None where they were not run or do not tell."""
        return None if self.run is None else needed(Behaviour((self.run,)))


@dataclass(frozen=True)
class Score:
    """How one text signal, read as a claim that a patch is needed or is not, compares with behaviour, over all points
    where both spoke."""

    claim: str
    right: int
    claimed: int
    true: int

    @property
    def precision(self) -> float | None:
        return self.right / self.claimed if self.claimed else None

    @property
    def recall(self) -> float | None:
        return self.right / self.true if self.true else None


@dataclass(frozen=True)
class Claim:
    """The `Affects:` of a patch against behaviour: `wrong` are the releases where the two differ, `measured` what the
    trailers are to be (as they are, where nothing is wrong)."""

    patch: Patch
    wrong: tuple[str, ...]
    measured: tuple[str, ...]


@dataclass(frozen=True)
class Replay:
    """`stacks`: release -> the stack that its behaviour was run in; `problems`: release -> why it was not."""

    upstream: str
    versions: tuple[str, ...]
    points: tuple[Point, ...]
    stacks: dict[str, str]
    problems: dict[str, str]
    sample: int
    claims: tuple[Claim, ...]

    @property
    def faults(self) -> list[str]:
        return sorted({point.fault for point in self.points})

    def at(self, fault: str, version: str) -> Point:
        return next(p for p in self.points if (p.fault, p.version) == (fault, version))


def replay(
    house: House, upstream_name: str, first: str, last: str, behaviour: str = "", sample: int | None = None
) -> Replay:
    """Try the set on every release from `first` to `last`; `behaviour` names releases, by commas, or `all`, whose
    tests are run too. What earlier runs saw of the others counts without being run again.

    Raises UserError for a release that the index does not offer, CouldNotRun where it cannot be reached. A release
    that no stack runs is a problem in the result, not an error.
    """
    upstream, sample = load_upstream(house, upstream_name), checked_sample(sample)
    if not first or not last:
        raise UserError("from which release to which? give FROM= and TO=")
    known = all_pins(house, upstream_name)
    if not any(map(load_series, known)):
        raise UserError(f"nothing to carry: no pin of {upstream_name} has patches")
    offered = offers(upstream)
    chosen = between(upstream, offered, first, last)
    versions = [offer.version for offer in chosen]
    asked = _asked(behaviour, versions)
    targets = [as_pin(house, upstream, offer, (), house.build / "bump" / "replay") for offer in chosen]
    with locked(house.build, "carry replay", say):
        with ThreadPoolExecutor(_FETCHERS) as pool:
            list(pool.map(lambda pin: _fetched(house, pin), targets))
        for pin in targets:
            release(house, pin)
        prepared = {pin.version: prepare(house, pin) for pin in known if load_series(pin)}
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            texts = list(pool.map(lambda pin: _texts(house, pin, prepared), targets))
    points, stacks, problems = [], {}, {}
    for target, text in zip(targets, texts, strict=True):
        runs: dict[str, Run] = {}
        candidates = lab.candidate_stacks(house, target, _near(known, target))
        try:
            if target.version in asked:
                stacks[target.version], runs = lab.pristine(house, target, candidates, sorted(text), sample)
            elif seen := lab.seen(house, target, candidates, sorted(text), sample):
                stacks[target.version], runs = seen
        except CouldNotRun as error:
            problems[target.version] = str(error)
            say(str(error))
        points += [Point(target.version, fault, signals, runs.get(fault)) for fault, signals in sorted(text.items())]
    claims = tuple(_claims(house, upstream_name, known, list(offered), points))
    return Replay(upstream_name, tuple(versions), tuple(points), stacks, problems, sample, claims)


def scores(points: Iterable[Point]) -> list[Score]:
    """Each single signal against behaviour. What behaviour does not tell counts nowhere."""
    judged = [(point.signals, point.needed) for point in points if point.needed is not None]
    claims = {
        "applies as it is: needed": (lambda s: s.text in ("applies", "offset"), True),
        "applies, or three-way: needed": (lambda s: s.carried, True),
        "conflicts or has no file: not needed": (lambda s: not s.carried, False),
        "reverse-applies: not needed": (lambda s: s.reverse_applies, False),
        "empty after three-way: not needed": (lambda s: s.empty, False),
        "either of the two: not needed": (lambda s: s.in_already, False),
        "neither of the two: needed": (lambda s: not s.in_already, True),
        "patched symbol gone or uncalled: not needed": (lambda s: bool(s.gone or s.uncalled), False),
    }
    return [
        Score(
            claim,
            right=sum(says(signals) and truth == means for signals, truth in judged),
            claimed=sum(says(signals) for signals, _ in judged),
            true=sum(truth == means for _, truth in judged),
        )
        for claim, (says, means) in claims.items()
    ]


def corrected(affects: Sequence[str], told: dict[str, bool], versions: Sequence[str]) -> tuple[str, ...]:
    """Affects values that say what was measured of a fault, and of the releases that were not run what they said
    before: a range for each stretch of `versions`, every release in order, that has it."""
    from packaging.specifiers import SpecifierSet

    ranges = [SpecifierSet(value) for value in affects]
    has = [told.get(v, any(each.contains(v) for each in ranges)) for v in versions]
    found: list[str] = []
    for number, version in enumerate(versions):
        if has[number] and (number == 0 or not has[number - 1]):
            end = next((n for n in range(number, len(has)) if not has[n]), None)
            found.append(f">={version},<{versions[end]}" if end else f">={version},<={versions[-1]}")
    return tuple(found)


def correct(house: House, found: Replay) -> list[Path]:
    """Rewrite the Affects trailers that behaviour contradicts; the patch files changed. Their pins need a higher
    revision and a new proof then: lint says so."""
    changed = []
    for claim in found.claims:
        if not claim.wrong or not claim.measured:
            continue
        lines = claim.patch.path.read_bytes().split(b"\n")
        numbers = [trailer.line - 1 for trailer in claim.patch.trailers if trailer.key == "Affects"]
        lines[numbers[0]] = b"\n".join(f"Affects: {value}".encode() for value in claim.measured)
        for number in reversed(numbers[1:]):
            del lines[number]
        beside = claim.patch.path.with_suffix(".patch.new")
        beside.write_bytes(b"\n".join(lines))
        os.replace(beside, claim.patch.path)
        changed.append(claim.patch.path)
    return changed


def _asked(behaviour: str, versions: Sequence[str]) -> set[str]:
    if behaviour == ALL:
        return set(versions)
    asked = {name.strip() for name in behaviour.split(",") if name.strip()}
    if unknown := sorted(asked - set(versions)):
        raise UserError(f"BEHAVIOUR names {', '.join(unknown)}, which is not among the releases replayed")
    return asked


def _fetched(house: House, pin: Pin) -> None:
    if not sdist_path(house, pin).exists():  # one that is there is checked when it is read
        fetch(house, pin)


def _near(known: Sequence[Pin], target: Pin) -> Pin:
    """The newest pin at or below a release, else the oldest."""
    from packaging.version import Version

    ordered = sorted(known, key=lambda pin: Version(pin.version))
    below = [pin for pin in ordered if Version(pin.version) <= Version(target.version)]
    return below[-1] if below else ordered[0]


def _texts(house: House, target: Pin, prepared: dict[str, Prepared]) -> dict[str, Signals]:
    """fault -> signals of its nearest patch, each on top of its own series."""
    found: dict[str, Signals] = {}
    wanted = nearest_patches(house, target)
    for version in {patch.path.parent.name for patch in wanted.values()}:
        for signals in probe(house, target, prepared[version]).signals:
            if wanted[signals.patch.fault].path == signals.patch.path:
                found[signals.patch.fault] = signals
    return found


def _claims(
    house: House, upstream: str, known: Sequence[Pin], versions: Sequence[str], points: Sequence[Point]
) -> Iterator[Claim]:
    from packaging.specifiers import SpecifierSet

    told: dict[str, dict[str, bool]] = {}
    for point in points:
        if point.needed is not None:
            told.setdefault(point.fault, {})[point.version] = point.needed
    for pin in known:
        for patch in load_series(load_pin(house, upstream, pin.version)):
            ranges, seen = [SpecifierSet(value) for value in patch.affects], told.get(patch.fault, {})
            wrong = [version for version, has in seen.items() if has != any(r.contains(version) for r in ranges)]
            yield Claim(patch, tuple(wrong), corrected(patch.affects, seen, versions) if wrong else patch.affects)
