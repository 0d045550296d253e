"""A folder of wheels as a static package index that any web server, or a file:// URL, can offer.

    <dest>/index.{html,json}
    <dest>/<project>/index.{html,json}, *.whl, *.whl.metadata

PEP 503 (HTML), 691 (JSON), 658 and 714 (metadata beside the wheel), 592 and 700 (fields). The index holds its
own copy of every wheel: one that is written in place elsewhere cannot change what was published.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from carry.errors import CouldNotRun, UserError
from carry.pages import render
from carry.wheelcheck import Wheel, read_wheel, sha256_of


def write_index(wheels: Iterable[Path], dest: Path) -> bool:
    """Make `dest` the index of exactly `wheels`; return whether anything had to be written.

    The same wheels give the same bytes, and nothing is touched where they are already there. A new index
    is written beside the old one and swapped in by two renames; `repair` mends a run that died between
    them. The caller holds the lock against other writers. Raises UserError for a bad wheel and for two
    wheels of one name and different content, CouldNotRun for a disk that cannot be written.
    """
    dest = _real(dest)
    checked = _by_name(map(read_wheel, wheels))
    pages = render(checked.values())
    try:
        with _clean_on_failure(dest):
            repair(dest)
            if _holds(dest, pages, checked.values()):
                return False
            _write(dest, pages, checked.values())
            _swap(dest)
    except OSError as error:
        why = error.strerror or str(error)
        raise CouldNotRun(f"{dest}: cannot write the index ({why}); the old one is unchanged") from None
    return True


def repair(dest: Path) -> None:
    """Undo what an interrupted `write_index` left: afterwards `dest` is whole, or was never there."""
    dest = _real(dest)
    old = _beside(dest, "old")
    if old.exists() and not dest.exists():
        os.rename(old, dest)
    for leftover in (old, _beside(dest, "new")):
        if leftover.exists():
            shutil.rmtree(leftover)


def read_index(dest: Path) -> dict[str, Wheel]:
    """The wheels of an index that `write_index` made, by file name; empty where there is none.

    Mends first what an interrupted run left. Raises UserError when a wheel is not the one that its page
    names: published bytes do not change.
    """
    dest = _real(dest)
    repair(dest)
    wheels = {}
    for page in sorted(dest.glob("*/index.json")):
        for file, sha256 in _listed(page).items():
            path = page.parent / file
            if not path.exists() or sha256_of(path) != sha256:
                what = "changed since it was" if path.exists() else "missing, though"
                raise UserError(f"{path}: {what} published; put it back, or delete {dest} and start it anew")
            wheels[file] = read_wheel(path)
    return wheels


def _listed(page: Path) -> dict[str, str]:
    try:
        files = json.loads(page.read_bytes())["files"]
        return {file["filename"]: file["hashes"]["sha256"] for file in files}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{page}: not an index page; delete {page.parent.parent} and start it anew") from None


@contextlib.contextmanager
def _clean_on_failure(dest: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            repair(dest)
        raise


def _by_name(wheels: Iterable[Wheel]) -> dict[str, Wheel]:
    found: dict[str, Wheel] = {}
    for wheel in wheels:
        other = found.setdefault(wheel.file, wheel)
        if other.sha256 != wheel.sha256:
            where = f"{other.path.parent} and {wheel.path.parent}"
            raise UserError(f"{wheel.file}: differs between {where}; remove the one that is wrong")
    return found


def _holds(dest: Path, pages: dict[str, bytes], wheels: Iterable[Wheel]) -> bool:
    sums = {f"{wheel.project}/{wheel.file}": wheel.sha256 for wheel in wheels}
    there = {path.relative_to(dest).as_posix() for path in dest.rglob("*") if not path.is_dir()}
    return (
        there == {*pages, *sums}
        and all((dest / name).read_bytes() == content for name, content in pages.items())
        and all(sha256_of(dest / name) == sha256 for name, sha256 in sums.items())
    )


def _write(dest: Path, pages: dict[str, bytes], wheels: Iterable[Wheel]) -> None:
    new = _beside(dest, "new")
    new.mkdir(parents=True)
    for wheel in wheels:
        folder = new / wheel.project
        folder.mkdir(exist_ok=True)
        if dest in _real(wheel.path).parents:
            os.link(wheel.path, folder / wheel.file)  # the old index's own copy, which goes with it
        else:
            shutil.copyfile(wheel.path, folder / wheel.file)
    for name, content in pages.items():
        (new / name).write_bytes(content)


def _swap(dest: Path) -> None:
    old = _beside(dest, "old")
    if dest.exists():
        os.rename(dest, old)
    os.rename(_beside(dest, "new"), dest)
    shutil.rmtree(old, ignore_errors=True)


def _beside(dest: Path, what: str) -> Path:
    return dest.with_name(f".{dest.name}.{what}")


def _real(dest: Path) -> Path:
    # A dest that is a symbolic link must have its target swapped, not itself.
    return Path(os.path.realpath(dest))
