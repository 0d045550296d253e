"""The rules every series keeps; each finding is `path:line: what; do this`."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from carry.errors import UserError
from carry.exports import commits, export
from carry.git import GitFailed
from carry.patches import FILE_NAME, Patch, apply_to, load_patch, series_paths, series_sha256
from carry.paths import House
from carry.pins import Pin, Upstream, load_pin, load_upstream, upstream_names
from carry.trees import release, temporary_index

# trailer -> may it repeat
_REQUIRED = {"Fault": False, "Affects": True, "Upstream-Status": False, "Proof": True}
_OPTIONAL = {"Bug": True, "Depends": True, "Signed-off-by": True}
_KNOWN = _REQUIRED | _OPTIONAL
_URL = r"https?://\S+"
_STATUSES = (
    ("Pending", r"Pending"),
    ("Submitted <URL>", rf"Submitted {_URL}"),
    ("Backport <version or commit>", r"Backport \S+"),
    ("Denied <URL>", rf"Denied {_URL}"),
    ("Inappropriate <reason>", r"Inappropriate \S.*"),
)
_OFFSET = re.compile(r"Hunk #(\d+) succeeded at (\d+) (?:with fuzz|\(offset)")


def lint(house: House, upstream: str | None = None, version: str | None = None) -> list[str]:
    """Findings on every series, on one upstream's, or on one pin's; empty where all is well.

    Raises UserError for an upstream or version that does not exist, CouldNotRun
    where a release cannot be fetched.
    """
    if upstream:
        load_upstream(house, upstream)
        if version:
            load_pin(house, upstream, version)
    found = [] if upstream else list(_strays(house, house.patches, {"*"}, "*/"))
    for name in [upstream] if upstream else _folders(house.patches):
        found += _upstream(house, name, version)
    return found if upstream or found else [*readme_findings(house)]


def _upstream(house: House, name: str, version: str | None) -> Iterator[str]:
    folder = house.patches / name
    if name not in upstream_names(house):
        yield f"{house.relative(folder)}:1: orphan folder without upstream.toml; add one, or remove it"
        return
    try:
        owner = load_upstream(house, name)
    except UserError as error:
        yield str(error)
        return
    if not version:
        yield from _strays(house, folder, {"upstream.toml", "variants.toml"}, "*/")
    for known in [version] if version else _folders(folder):
        yield from _pin(house, owner, known)


def _pin(house: House, owner: Upstream, version: str) -> Iterator[str]:
    folder = owner.folder / version
    if not (folder / "pin.toml").exists():
        yield f"{house.relative(folder)}:1: orphan folder without pin.toml; add one, or remove the folder"
        return
    yield from _strays(house, folder, {"pin.toml", "proof.json", "matrix.json"}, "*.patch")
    try:
        pin = load_pin(house, owner.name, version)
    except UserError as error:
        yield str(error)
        return
    numbering = list(_numbering(house, pin))
    yield from numbering
    series, unreadable = [], []
    for path in series_paths(pin):
        try:
            series.append(load_patch(path))
        except UserError as error:
            unreadable.append(f"{house.relative(path.parent)}/{error}")
    yield from unreadable
    yield from _duplicates(house, series)
    yield from _dependencies(house, series)
    for patch in series:
        yield from _trailers(house, pin, patch)
        yield from _files(house, pin, patch)
    if not numbering and not unreadable:
        yield from _applying(house, pin, series)
        found = list(revision_findings(house, pin, series))
        yield from found or proof_findings(house, pin, series)


def _numbering(house: House, pin: Pin) -> Iterator[str]:
    for expected, path in enumerate(series_paths(pin), 1):
        match = FILE_NAME.fullmatch(path.name)
        if not match or int(match[1]) != expected:
            yield (
                f"{house.relative(path)}:1: expected number {expected:04d}; number patches from 0001 without "
                "gap or repeat"
            )
            return


def _duplicates(house: House, series: Sequence[Patch]) -> Iterator[str]:
    first: dict[str, Patch] = {}
    for patch in series:
        if patch.fault and first.setdefault(patch.fault, patch) is not patch:
            yield (
                f"{house.relative(patch.path)}:{_line(patch, 'Fault')}: fault {patch.fault} already has "
                f"{first[patch.fault].path.name}; one patch per fault, so join them"
            )


def _dependencies(house: House, series: Sequence[Patch]) -> Iterator[str]:
    """Each Depends names the fault of an earlier patch."""
    earlier: set[str] = set()
    for patch in series:
        for trailer in patch.trailers:
            if trailer.key == "Depends" and trailer.value not in earlier:
                yield (
                    f"{house.relative(patch.path)}:{trailer.line}: Depends {trailer.value!r} is the fault of no "
                    "earlier patch of the series; write one that is"
                )
        earlier.add(patch.fault)


def _trailers(house: House, pin: Pin, patch: Patch) -> Iterator[str]:
    def found(line: int, what: str) -> str:
        return f"{house.relative(patch.path)}:{line}: {what}"

    end = max((trailer.line for trailer in patch.trailers), default=1)
    for line, text in patch.stray_lines:
        yield found(line, f"{text!r} stands among the trailers; move it up and leave a blank line before them")
    for trailer in patch.trailers:
        if trailer.key not in _KNOWN:
            yield found(trailer.line, f"unknown trailer {trailer.key!r}; known are {', '.join(_KNOWN)}")
    for key, repeats in _KNOWN.items():
        lines = [trailer.line for trailer in patch.trailers if trailer.key == key]
        if key in _REQUIRED and not lines:
            yield found(end, f"trailer {key!r} is missing; add it to the commit message")
        if len(lines) > 1 and not repeats:
            yield found(lines[1], f"a second {key!r}; keep one")
    for trailer in patch.trailers:
        what = _value_problem(house, trailer.key, trailer.value)
        if what:
            yield found(trailer.line, what)
    yield from _range(house, pin, patch)


def _value_problem(house: House, key: str, value: str) -> str:
    if key == "Fault" and not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", value):
        return f"fault id {value!r} is not lower-case words joined by hyphens; write it so"
    if key == "Bug" and not re.fullmatch(_URL, value):
        return f"Bug {value!r} is not one URL; write one per line"
    if key == "Upstream-Status" and not any(re.fullmatch(pattern, value) for _, pattern in _STATUSES):
        known = " | ".join(name for name, _ in _STATUSES)
        return f"Upstream-Status {value!r} is malformed; write one of: {known}"
    if key == "Proof":
        inside = not Path(value).is_absolute() and ".." not in Path(value).parts
        if not inside or not (house.root / value).is_file():
            return f"proof {value} does not exist in this repository; write the test's path"
    return ""


def _range(house: House, pin: Pin, patch: Patch) -> Iterator[str]:
    """Each Affects is PEP 440, and one of them holds the pin's own version."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    ranges = []
    for trailer in patch.trailers:
        if trailer.key != "Affects":
            continue
        try:
            ranges.append(SpecifierSet(trailer.value))
        except InvalidSpecifier:
            yield (
                f"{house.relative(patch.path)}:{trailer.line}: Affects {trailer.value!r} is not a PEP 440 "
                "specifier; write such as >=0.13.0,<0.20"
            )
            return
    if ranges and not any(pin.version in each for each in ranges):
        yield (
            f"{house.relative(patch.path)}:{_line(patch, 'Affects')}: Affects leaves out {pin.version}, the "
            "release it is carried for; correct the range or drop the patch"
        )


def _files(house: House, pin: Pin, patch: Patch) -> Iterator[str]:
    shown = house.relative(patch.path)
    if not patch.changes:
        yield f"{shown}:1: changes no file; drop it"
    for change in patch.changes:
        for mirror, original in pin.upstream.mirrors.items():
            if change.file.startswith(mirror + "/"):
                yield (
                    f"{shown}:{change.line}: touches {change.file}, a copy; patch "
                    f"{original}{change.file[len(mirror) :]} instead, the copy follows"
                )


def _applying(house: House, pin: Pin, series: Sequence[Patch]) -> Iterator[str]:
    """Applies without offset, and exports to the very bytes it was read from."""
    base = release(house, pin)
    folder = house.relative(pin.folder)
    refresh = f"run `make apply` and `make refresh` with UPSTREAM={pin.upstream.name} VERSION={pin.version}"
    moved = False
    try:
        with temporary_index(base) as index:
            for patch in series:
                for line in apply_to(index, [patch]):
                    hit = _OFFSET.match(line)
                    if hit:
                        moved = True
                        name = f"{folder}/{patch.path.name}"
                        yield f"{name}:1: hunk {hit[1]} applies at line {hit[2]} only; {refresh}"
        head = commits(base, pin, series)
    except UserError as error:
        if not moved:
            yield f"{folder}/{error}"
        return
    except GitFailed as error:
        yield f"{folder}:1: {error}; {refresh}"
        return
    with tempfile.TemporaryDirectory(prefix="carry-lint-") as scratch:
        fresh = {path.name: path.read_bytes() for path in export(base.repo, base.commit, head, pin, Path(scratch))}
    for patch in series:
        again = fresh.pop(patch.path.name, None)
        shown = f"{folder}/{patch.path.name}"
        if again is None:
            yield f"{shown}:1: is exported under another name; {refresh}"
        elif again != (now := patch.path.read_bytes()):
            yield f"{shown}:{_first_difference(now, again)}: does not survive apply and export; {refresh}"


def revision_findings(house: House, pin: Pin, series: Sequence[Patch]) -> Iterator[str]:
    """The revision rises when the series differs from the one that proof.json was recorded for."""
    path = pin.folder / "proof.json"
    if not path.exists():
        return
    shown = house.relative(path)
    try:
        proof: Any = json.loads(path.read_text(encoding="utf-8"))
        proven, revision = proof["series_sha256"], int(proof["revision"])
    except (ValueError, KeyError, TypeError):
        yield f"{shown}:1: not a proof; record it again with `make record`"
        return
    if proven != series_sha256(series) and pin.revision <= revision:
        pin_file = house.relative(pin.folder / "pin.toml")
        line = next(
            (
                number
                for number, text in enumerate((pin.folder / "pin.toml").read_text().splitlines(), 1)
                if text.lstrip().startswith("revision")
            ),
            1,
        )
        yield (
            f"{pin_file}:{line}: the series changed since revision {revision} was proven; "
            f"raise revision to {revision + 1}"
        )


def proof_findings(house: House, pin: Pin, series: Sequence[Patch]) -> Iterator[str]:
    """The proof committed with a series is of this series, of this revision, and says proven."""
    from carry.report import recorded

    shown = house.relative(pin.folder / "proof.json")
    again = f"run `make prove UPSTREAM={pin.upstream.name} VERSION={pin.version}` and `make record`"
    try:
        proof = recorded(house, pin)
    except UserError as error:
        yield str(error)
        return
    if proof is None:
        return
    if (proof["series_sha256"], proof["revision"]) != (series_sha256(series), pin.revision):
        yield f"{shown}:1: stale: of revision {proof['revision']}, or of another series; {again}"
    elif proof["verdict"] != "proven":
        yield f"{shown}:1: says {proof['verdict']}; mend the patch or its test, then {again}"


def readme_findings(house: House) -> Iterator[str]:
    """The README's table is the one that the committed proofs give."""
    from carry.matrixtable import with_table
    from carry.report import with_status

    path = house.root / "README.md"
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    try:
        if with_status(text, house) != text:
            yield "README.md:1: the status table is not that of the committed proofs; run `make record`"
        if with_table(text, house) != text:
            yield "README.md:1: the table of the matrix is not that of the committed counts; run `make record`"
    except UserError as error:
        yield str(error)


def _strays(house: House, folder: Path, names: set[str], pattern: str) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        good = path.is_dir() if pattern.endswith("/") else path.match(pattern)
        if not good and path.name not in names:
            yield f"{house.relative(path)}:1: orphan file that nothing reads; remove or rename it"


def _folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _line(patch: Patch, key: str) -> int:
    return next((trailer.line for trailer in patch.trailers if trailer.key == key), 1)


def _first_difference(old: bytes, new: bytes) -> int:
    pairs = zip(old.split(b"\n"), new.split(b"\n"), strict=False)
    return next((number for number, (left, right) in enumerate(pairs, 1) if left != right), 1)
