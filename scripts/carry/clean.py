"""Removal of everything that can be made again."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from carry.errors import UserError
from carry.lock import locked
from carry.paths import House
from carry.progress import say
from carry.worktree import unexported

# Scratch folders carry a leading dot and lie beside what they become.
_SCRATCH = (
    "build/cache/.unpack-*",
    "build/cache/git/.new-*",
    "build/cache/sdists/*/.fetch-*",
    "build/cache/wheels/.build-*",
    "build/trees/.new-*",
    "dist/wheels/.*.new",
    "patches/*/.refresh-*",
    "patches/*/.bump-*",
    "patches/*/*/*.patch.new",
)


def sweep(house: House) -> None:
    """Remove the scratch that killed runs left. The caller holds the lock, so none of it is in use."""
    for pattern in _SCRATCH:
        for path in house.root.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def clean(house: House) -> list[str]:
    """Remove build/ and dist/ but for dist/simple/, which holds what no build brings back: older revisions.

    Returns what was kept. UserError, removing nothing, where a work tree holds unexported work. The caller
    holds the lock on build/; waits for a run that tests.
    """
    _refuse_to_lose(house)
    with locked(house.build / "sites", "carry clean", say):
        _refuse_to_lose(house)  # somebody may have worked on while we waited
        _empty(house.dist, house.simple.name)
        # The lock's own file goes last, while we still hold it.
        _empty(house.build, ".lock")
        _empty(house.build)
    return [f"{house.relative(house.simple)}/"] if house.simple.exists() else []


def _refuse_to_lose(house: House) -> None:
    kept = unexported(house)
    if kept:
        others = f" (and {len(kept) - 1} more like it)" if kept[1:] else ""
        raise UserError(f"{kept[0]}{others}")


def _empty(folder: Path, keep: str = "") -> None:
    """Remove what is in `folder`, which may be a link, but for `keep`; and the folder where nothing is left."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name == keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not folder.is_symlink():
        with contextlib.suppress(OSError):  # not empty, or not there; a run that waited may be back in it
            folder.rmdir()
