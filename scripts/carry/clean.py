"""Removal of everything that can be made again."""

from __future__ import annotations

import shutil

from carry.errors import UserError
from carry.paths import House
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
)


def sweep(house: House) -> None:
    """Remove the scratch that killed runs left. The caller holds the lock, so none of it is in use."""
    for pattern in _SCRATCH:
        for path in house.root.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def clean(house: House) -> None:
    """Remove build/ and dist/; UserError, removing nothing, where a work tree holds unexported work."""
    kept = unexported(house)
    if kept:
        others = f" (and {len(kept) - 1} more like it)" if kept[1:] else ""
        raise UserError(f"{kept[0]}{others}")
    # The lock's own file goes last, with its folder, while we still hold it.
    for folder in (house.dist, house.build):
        if folder.exists():
            shutil.rmtree(folder)
