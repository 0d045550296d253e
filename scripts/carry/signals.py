"""What a release's text says of each patch: does it apply, is it in already, is what it patches still there.

Everything happens in temporary indexes of the bare repository. Patches of a series touch neighbouring lines, so each
is tried on top of those before it that could be carried.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from carry.exports import commits_of, export
from carry.git import GitFailed, git_bytes
from carry.patches import NO_BLOB, FileChange, Patch, apply_series, load_series
from carry.paths import House
from carry.pins import Pin
from carry.trees import ApplyFailed, Index, Release, release, temporary_index

APPLIES, OFFSET, THREE_WAY, CONFLICT, GONE = "applies", "offset", "three-way", "conflict", "file gone"
_CARRIED = (APPLIES, OFFSET, THREE_WAY)
_OFFSET = re.compile(r"Hunk #\d+ succeeded at \d+ \(offset")
_SHOWN_LINES = 60


@dataclass(frozen=True)
class Symbol:
    """A function or class that a patch changes, as `Class.method`."""

    file: str
    name: str

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


@dataclass(frozen=True)
class Conflict:
    """Where a patch does not go on: its file and the line of the hunk in the patch file, the upstream file, the
    line in the release near which it should have gone (0: unknown), and the lines, with marks where they merge."""

    patch_line: int
    file: str
    near_line: int
    hunk: str


@dataclass(frozen=True)
class Signals:
    """The static signals of one patch against one release.

    `text` is applies, offset, three-way, conflict or file gone; `empty`: after a three-way merge nothing of the patch
    is left; `gone`: patched functions that the release lacks; `uncalled`: those that nothing names any more.
    """

    patch: Patch
    text: str
    reverse_applies: bool
    empty: bool
    conflict: Conflict | None
    gone: tuple[Symbol, ...]
    uncalled: tuple[Symbol, ...]

    @property
    def carried(self) -> bool:
        """It went on, and changed something."""
        return self.text in _CARRIED

    @property
    def in_already(self) -> bool:
        """By its text, the release holds it."""
        return self.reverse_applies or self.empty

    @property
    def words(self) -> tuple[str, ...]:
        """All of them, for people."""
        said = [self.text]
        said += ["reverse-applies"] if self.reverse_applies else []
        said += ["empty after three-way"] if self.empty else []
        said += [f"{symbol} is gone" for symbol in self.gone]
        said += [f"{symbol} is no longer called" for symbol in self.uncalled]
        return tuple(said)


@dataclass(frozen=True)
class Probe:
    """A series tried on a release: signals in order, and (patch, tree) of each patch that went on."""

    release: Release
    signals: tuple[Signals, ...]
    laid: tuple[tuple[Patch, str], ...]


@dataclass(frozen=True)
class Prepared:
    """A series whose objects are in the repository, with the functions each patch changes and whether the
    release it was made for names them anywhere."""

    release: Release
    series: tuple[Patch, ...]
    symbols: dict[str, tuple[Symbol, ...]]  # by the patch's sha256
    called: frozenset[str]


def prepare(house: House, pin: Pin) -> Prepared:
    """The pin's series, ready to be tried elsewhere: three-way merges need the blobs it was made for.

    Raises as `apply_series`. The caller holds the lock on build/.
    """
    series = load_series(pin)
    base = apply_series(house, pin, series).release
    symbols = {patch.sha256: tuple(_symbols(base.repo, patch)) for patch in series}
    named = _named(base, pin.upstream.import_name, symbols.values())
    return Prepared(base, series, symbols, named)


def probe(house: House, pin: Pin, prepared: Prepared, keep: Iterable[str] | None = None) -> Probe:
    """Try the prepared series on the release of `pin`; `keep` names the faults to carry, all of them by default.

    Patches of other faults are probed too, but nothing is put on top of them.
    """
    base = release(house, pin)
    kept = {patch.fault for patch in prepared.series} if keep is None else set(keep)
    wanted = [prepared.symbols[patch.sha256] for patch in prepared.series]
    named = _named(base, pin.upstream.import_name, wanted)
    found, laid, top = [], [], base.tree
    with temporary_index(base) as index:
        for patch in prepared.series:
            before = index.save()
            signals, tree = _try(index, patch, top, prepared, named)
            found.append(signals)
            if tree and patch.fault in kept:
                laid.append((patch, tree))
                top = tree
            else:
                index.restore(before)
    return Probe(base, tuple(found), tuple(laid))


def write_series(probed: Probe, pin: Pin, folder: Path) -> tuple[Patch, ...]:
    """The patches that went on, refreshed for the release: written to `folder`, which is made anew, and read back."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if probed.laid:
        export(probed.release.repo, probed.release.commit, commits_of(probed.release, probed.laid), pin, folder)
    return load_series(replace(pin, folder=folder))


def _try(index: Index, patch: Patch, top: str, prepared: Prepared, named: frozenset[str]):
    """Signals of one patch on `index`, which holds the tree `top`, and the tree with it on (None: it does not go on).

    Afterwards the index holds that tree, or anything.
    """
    before, blobs = index.save(), index.blobs(patch.files)
    reverse = index.reverse_applies(patch.path)
    text, tree, failed, plain = APPLIES, None, None, before
    try:
        said = index.apply([patch.path])
        tree, plain = index.write_tree(), index.save()
        text = OFFSET if any(map(_OFFSET.match, said)) else APPLIES
        index.restore(before)
    except ApplyFailed as error:
        failed = error
        text = CONFLICT if all(c.file in blobs or c.old_blob == NO_BLOB for c in patch.changes) else GONE
    merged, unmerged = _merge(index, patch) if text != GONE else (None, {})
    conflict = None
    if tree:
        index.restore(plain)
    elif merged and merged != top:
        text, tree = THREE_WAY, merged
    elif not merged:
        conflict = _conflict(index.repo, patch, failed, unmerged)
    symbols = prepared.symbols[patch.sha256]
    defined = {file: _definitions(index.repo, blobs[file][1]) for file in {s.file for s in symbols} if file in blobs}
    gone = tuple(s for s in symbols if s.file not in defined or s.name not in defined[s.file])
    uncalled = tuple(s for s in symbols if s not in gone and s.last in prepared.called and s.last not in named)
    return Signals(patch, text, reverse, merged == top, conflict, gone, uncalled), tree


def _merge(index: Index, patch: Patch) -> tuple[str | None, dict[str, dict[int, str]]]:
    """The tree after a three-way merge of `patch` into the index, or None and the conflicts: file -> stage -> blob."""
    try:
        index.run(["apply", "--cached", "--3way", str(patch.path.resolve())])
        return index.write_tree(), {}
    except GitFailed:
        return None, index.unmerged()


def _conflict(repo: Path, patch: Patch, failed: ApplyFailed, unmerged: dict[str, dict[int, str]]) -> Conflict:
    change = next((c for c in patch.changes if c.file == failed.file), patch.changes[0])
    hunk = next((h for h in change.hunks if h.old_line == failed.old_line), None)
    at = hunk.line if hunk else change.line
    if failed.file in unmerged:
        return Conflict(at, failed.file, *_merge_text(repo, unmerged[failed.file]))
    lines = _hunk_lines(patch, hunk.line) if hunk else [f"{failed.file}: {failed.said}"]
    return Conflict(at, failed.file, 0, _shortened(lines))


def _merge_text(repo: Path, stages: dict[int, str]) -> tuple[int, str]:
    """The line of the first conflict of a merge, and its lines between marks."""
    with tempfile.TemporaryDirectory(prefix="carry-merge-") as scratch:
        paths = []
        for stage in (2, 1, 3):
            path = Path(scratch) / str(stage)
            path.write_bytes(_blob(repo, stages[stage]) if stage in stages else b"")
            paths.append(str(path))
        labels = [part for name in ("the release", "what it was made for", "the patch") for part in ("-L", name)]
        # exits with the number of conflicts
        _, out, _ = git_bytes(["merge-file", "-p", "--diff3", *labels, *paths], repo, ok=range(128))
    lines = out.decode("utf-8", "replace").splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith("<<<<<<< ")), 0)
    end = next((n for n, line in enumerate(lines[start:], start) if line.startswith(">>>>>>> ")), len(lines) - 1)
    return start + 1, _shortened(lines[max(0, start - 3) : end + 4])


def _shortened(lines: list[str]) -> str:
    more = len(lines) - _SHOWN_LINES
    return "\n".join([*lines[:_SHOWN_LINES], *([f"… {more} more lines"] if more > 0 else [])])


def _hunk_lines(patch: Patch, start: int) -> list[str]:
    """The hunk at line `start` of the patch file, without its @@ line."""
    return _text(patch)[start : _end_of(patch, start)]


def _end_of(patch: Patch, start: int) -> int:
    lines = _text(patch)
    return next((n for n in range(start, len(lines)) if lines[n][:1] not in ("+", "-", " ", "\\")), len(lines))


def _text(patch: Patch) -> list[str]:
    return patch.path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()


def _symbols(repo: Path, patch: Patch) -> Iterable[Symbol]:
    """The innermost function or class around each changed line of a Python file that is there already."""
    found: dict[Symbol, None] = {}
    for change in patch.changes:
        if not change.file.endswith(".py") or change.old_blob in (None, NO_BLOB):
            continue
        spans = _definitions(repo, change.old_blob)
        for line in _changed_lines(patch, change):
            around = [(last - first, name) for name, (first, last) in spans.items() if first <= line <= last]
            if around:
                found[Symbol(change.file, min(around)[1])] = None
    return found


def _changed_lines(patch: Patch, change: FileChange) -> Iterable[int]:
    """Line numbers, in the file before the patch, that it removes, or after which it adds."""
    for hunk in change.hunks:
        at = hunk.old_line
        for line in _hunk_lines(patch, hunk.line):
            if line[:1] in ("-", "+"):
                yield at if line[0] == "-" else at - 1
            at += line[:1] in ("-", " ")


@functools.lru_cache(maxsize=2048)
def _definitions(repo: Path, blob: str) -> dict[str, tuple[int, int]]:
    """Qualified name -> (first, last) line of every function and class of a Python file; none where it is no Python."""
    try:
        tree = ast.parse(_blob(repo, blob))
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, tuple[int, int]] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = prefix + child.name
                found.setdefault(name, (child.lineno, child.end_lineno or child.lineno))
                walk(child, f"{name}.")
            elif isinstance(child, ast.stmt):
                walk(child, prefix)

    walk(tree, "")
    return found


def forget_definitions() -> None:
    """Parse every file anew, as a first run does."""
    _definitions.cache_clear()


def _named(base: Release, package: str, symbols: Iterable[Iterable[Symbol]]) -> frozenset[str]:
    """Those of the symbols' own names that the release's package has somewhere else than after `def` or `class`."""
    names = sorted({symbol.last for several in symbols for symbol in several})
    if not names:
        return frozenset()
    pattern = rf"((def|class) +)?({'|'.join(names)})"
    args = ["grep", "-h", "-o", "-w", "-E", pattern, base.tree, "--", f"{package}/*.py"]
    _, out, _ = git_bytes(args, base.repo, ok=(0, 1))
    counted = Counter(out.decode("utf-8", "replace").split("\n"))
    # `__init__` and its like are called by syntax
    return frozenset(name for name in names if counted[name] or name.startswith("__"))


def _blob(repo: Path, blob: str) -> bytes:
    return git_bytes(["cat-file", "blob", blob], repo)[1]
