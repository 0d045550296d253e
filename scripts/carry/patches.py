"""Patch files and series: read, checked for what applying needs, applied."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from carry.errors import UserError
from carry.paths import House
from carry.pins import Pin
from carry.trees import ApplyFailed, Index, Release, release, temporary_index

FILE_NAME = re.compile(r"(\d{4})-[^/\s]+\.patch")
_TRAILER = re.compile(r"([A-Za-z][A-Za-z-]*): +(.*\S)\s*$")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NO_BLOB = "0" * 40


class Hunk(NamedTuple):
    """A hunk: its number within its file, its line in the patch file, and the upstream line it starts at."""

    number: int
    line: int
    old_line: int


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file; blob ids as its `index` line gives them (None: no such line)."""

    file: str
    line: int
    old_blob: str | None
    new_blob: str | None
    hunks: tuple[Hunk, ...]


class Trailer(NamedTuple):
    key: str
    value: str
    line: int


@dataclass(frozen=True)
class Patch:
    """One patch file."""

    path: Path
    subject: str
    trailers: tuple[Trailer, ...]
    stray_lines: tuple[tuple[int, str], ...]  # lines among the trailers that are none
    changes: tuple[FileChange, ...]
    sha256: str

    def values(self, key: str) -> tuple[str, ...]:
        return tuple(trailer.value for trailer in self.trailers if trailer.key == key)

    def _first(self, key: str) -> str:
        return next(iter(self.values(key)), "")

    @property
    def number(self) -> int:
        return int(self.path.name[:4])

    @property
    def fault(self) -> str:
        return self._first("Fault")

    @property
    def bugs(self) -> tuple[str, ...]:
        return self.values("Bug")

    @property
    def affects(self) -> tuple[str, ...]:
        """PEP 440 specifiers; their union is the range of releases with the fault."""
        return self.values("Affects")

    @property
    def depends(self) -> tuple[str, ...]:
        """Faults of earlier patches of the series that this one cannot do without."""
        return self.values("Depends")

    @property
    def upstream_status(self) -> str:
        return self._first("Upstream-Status")

    @property
    def proofs(self) -> tuple[str, ...]:
        return self.values("Proof")

    @property
    def proof(self) -> str:
        return self._first("Proof")

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(change.file for change in self.changes)


@dataclass(frozen=True)
class Applied:
    """A release with a series on it: the resulting tree, and what git reported on the way."""

    release: Release
    tree: str
    mirrored: tuple[str, ...]
    said: tuple[str, ...]


def series_paths(pin: Pin) -> list[Path]:
    return sorted(pin.folder.glob("*.patch"))


def load_series(pin: Pin) -> tuple[Patch, ...]:
    """The pin's patches in order. Raises UserError where a file's number is missing, twice or skipped."""
    paths = series_paths(pin)
    for expected, path in enumerate(paths, 1):
        shown = f"{pin.upstream.name}/{pin.version}/{path.name}"
        match = FILE_NAME.fullmatch(path.name)
        if not match or int(match[1]) != expected:
            raise UserError(
                f"patches/{shown}: expected number {expected:04d}; number patches from 0001 "
                "without gap or repeat, or let `carry refresh` do it"
            )
    return tuple(load_patch(path) for path in paths)


def load_patch(path: Path) -> Patch:
    """Read one patch file. Raises UserError where it is not a `git format-patch` mail."""
    data = path.read_bytes()
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    if not lines[0].startswith("From "):
        raise UserError(f"{path.name}:1: not a git format-patch file; export it with `carry refresh`")
    cut = next((n for n, line in enumerate(lines) if line == "---"), None)
    if cut is None:
        raise UserError(f"{path.name}:1: no `---` line ends the message; export it with `carry refresh`")
    trailers, stray_lines = _trailers(lines[:cut])
    return Patch(
        path=path,
        subject=_subject(lines[:cut]),
        trailers=trailers,
        stray_lines=stray_lines,
        changes=_changes(lines, cut),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def series_sha256(series: Sequence[Patch]) -> str:
    """sha256 over one `<file name>\\0<sha256>\\n` per patch, in order."""
    digest = hashlib.sha256()
    for patch in series:
        digest.update(f"{patch.path.name}\0{patch.sha256}\n".encode())
    return digest.hexdigest()


def apply_series(house: House, pin: Pin, series: Sequence[Patch]) -> Applied:
    """The pin's release with `series` applied and carried over to the mirrors, as a tree; no checkout.

    Raises UserError naming patch file, hunk and line where one does not apply,
    and where a changed file is not what its patch says it becomes.
    """
    base = release(house, pin)
    with temporary_index(base) as index:
        said = apply_to(index, series)
        check_blobs(index, series)
        mirrored = index.carry_over(pin.upstream.mirrors)
        return Applied(base, index.write_tree(), tuple(mirrored), tuple(said))


def apply_to(index: Index, series: Sequence[Patch]) -> list[str]:
    """Apply `series` to `index`; returns git's report. Raises UserError as `apply_series`."""
    try:
        return index.apply([patch.path for patch in series])
    except ApplyFailed as failed:
        patch = next(patch for patch in series if patch.path == failed.patch)
        raise UserError(_where(patch, failed)) from None


def check_blobs(index: Index, series: Sequence[Patch]) -> None:
    """Assert that every changed file has the content its last patch promises in its `index` line."""
    promised = {change.file: (patch, change) for patch in series for change in patch.changes}
    blobs = index.blobs(list(promised))
    for file, (patch, change) in promised.items():
        found = blobs.get(file, ("", NO_BLOB))[1]
        if change.new_blob and change.new_blob != found:
            raise UserError(
                f"{patch.path.name}:{change.line}: applied, but {file} is then not the text the patch was "
                "made for; run `carry apply`, look at it, and `carry refresh`"
            )


def _where(patch: Patch, failed: ApplyFailed) -> str:
    change = next((change for change in patch.changes if change.file == failed.file), None)
    name = patch.path.name
    if change is None:
        return f"{name}: does not apply: {failed.file}: {failed.said}; rebase it on this release"
    hunk = next((hunk for hunk in change.hunks if hunk.old_line == failed.old_line), None)
    if hunk is None:
        return f"{name}:{change.line}: does not apply to {failed.file}: {failed.said}; rebase it on this release"
    return (
        f"{name}:{hunk.line}: hunk {hunk.number} of {len(change.hunks)} does not apply to "
        f"{failed.file}:{hunk.old_line}: {failed.said}; rebase it on this release"
    )


def _subject(head: Sequence[str]) -> str:
    for number, line in enumerate(head):
        if line.startswith("Subject: "):
            text = line.removeprefix("Subject: ")
            for more in head[number + 1 :]:
                if not more.startswith((" ", "\t")):
                    break
                text += " " + more.strip()
            return re.sub(r"^\[PATCH[^]]*\] ", "", _decoded(text) if "=?" in text else text)
    return ""


def _decoded(text: str) -> str:
    from email.header import decode_header, make_header

    return str(make_header(decode_header(text)))


def _trailers(head: Sequence[str]) -> tuple[tuple[Trailer, ...], tuple[tuple[int, str], ...]]:
    """The last paragraph's `Key: value` lines, and its other lines; prose only gives none of either."""
    end = len(head)
    while end and not head[end - 1].strip():
        end -= 1
    start = end
    while start and head[start - 1].strip():
        start -= 1
    if not any(not line.strip() for line in head[:start]):
        return (), ()  # still the mail header
    found: list[Trailer] = []
    strays = []
    for number, line in enumerate(head[start:end], start + 1):
        match = _TRAILER.match(line)
        if match:
            found.append(Trailer(match[1], match[2], number))
        elif found and line.startswith((" ", "\t")):
            last = found.pop()
            found.append(last._replace(value=f"{last.value} {line.strip()}"))
        else:
            strays.append((number, line))
    return tuple(found), tuple(strays) if found else ()


def _changes(lines: Sequence[str], start: int) -> tuple[FileChange, ...]:
    found: list[FileChange] = []
    file, at, blobs, hunks = "", 0, (None, None), []

    def close() -> None:
        if file:
            found.append(FileChange(file, at, *blobs, tuple(hunks)))

    number = start
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("diff --git "):
            close()
            half = (len(line) - len("diff --git a/ b/")) // 2
            file, at, blobs, hunks = line[len("diff --git a/") :][:half], number, (None, None), []
        elif file and line.startswith("index "):
            old, _, new = line.split()[1].partition("..")
            blobs = (old, new) if len(old) == len(new) == 40 else (None, None)
        elif file and (match := _HUNK.match(line)):
            hunks.append(Hunk(len(hunks) + 1, number, int(match[1])))
            number = _after_hunk(lines, number, int(match[2] or 1), int(match[4] or 1))
    close()
    return tuple(found)


def _after_hunk(lines: Sequence[str], number: int, old: int, new: int) -> int:
    while number < len(lines) and (old > 0 or new > 0):
        sign = lines[number][:1] or " "
        old -= sign in " -"
        new -= sign in " +"
        number += 1
    return number
