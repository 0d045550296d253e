"""Where things are: the house and its rooms."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from carry.errors import UserError


@dataclass(frozen=True)
class House:
    """The repository and the folders that `carry` writes below it."""

    root: Path

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def tests(self) -> Path:
        return self.root / "tests"

    @property
    def stacks(self) -> Path:
        return self.root / "ci" / "stacks"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def cache(self) -> Path:
        return self.build / "cache"

    @property
    def trees(self) -> Path:
        return self.build / "trees"

    @property
    def candidate(self) -> Path:
        return self.build / "candidate" / "simple"

    @property
    def dist(self) -> Path:
        return self.root / "dist"

    @property
    def wheels(self) -> Path:
        return self.dist / "wheels"

    @property
    def proofs(self) -> Path:
        return self.dist / "proofs"

    @property
    def matrices(self) -> Path:
        return self.dist / "matrix"

    @property
    def simple(self) -> Path:
        return self.dist / "simple"

    def relative(self, path: Path) -> str:
        """`path` as a person at the root would type it."""
        try:
            return str(path.relative_to(self.root))
        except ValueError:
            return str(path)


def find_house() -> House:
    """The house around the current folder, or the one that CARRY_ROOT names.

    Raises UserError where there is none.
    """
    named = os.environ.get("CARRY_ROOT")
    if named:
        root = Path(named).resolve()
        if not (root / "patches").is_dir():
            raise UserError(f"CARRY_ROOT={named} has no patches/ folder; point it at a carry repository")
        return House(root)
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "patches").is_dir() and _is_ours(folder / "pyproject.toml"):
            return House(folder)
    raise UserError(f"{here} is not inside a carry repository; cd there, or set CARRY_ROOT to it")


def _is_ours(pyproject: Path) -> bool:
    try:
        return 'name = "carry"' in pyproject.read_text(encoding="utf-8")
    except OSError:
        return False
