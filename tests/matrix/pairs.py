"""Pairwise selection: few cells that hold every pair of values of two axes, the same ones each time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matrix.cells import NAMES, Cell, is_core

_TRIES = 40

Pair = tuple[str, object, str, object]


class Selection(NamedTuple):
    """``cells`` in order of ``valid``; ``covered`` of ``possible`` pairs of values."""

    cells: list[Cell]
    covered: int
    possible: int


def pairs(cell: Cell) -> list[Pair]:
    values = [(name, getattr(cell, name)) for name in NAMES]
    return [(*one, *other) for one, other in itertools.combinations(values, 2)]


def covered_by(cells: Iterable[Cell]) -> set[Pair]:
    return {pair for cell in cells for pair in pairs(cell)}


def select(valid: Sequence[Cell]) -> Selection:
    """The core in full, and cells that cover every pair of axis values that any valid cell has."""
    order = list(valid)
    random.Random(4).shuffle(order)
    at: dict[Pair, list[Cell]] = {}
    for cell in order:
        for pair in pairs(cell):
            holders = at.setdefault(pair, [])
            if len(holders) < _TRIES:
                holders.append(cell)
    chosen = {cell for cell in valid if is_core(cell)}
    open_pairs = dict.fromkeys(sorted(at, key=repr))
    for cell in chosen:
        for pair in pairs(cell):
            open_pairs.pop(pair, None)
    possible = len(at)
    while open_pairs:
        first = next(iter(open_pairs))
        best = max(at[first], key=lambda c: sum(p in open_pairs for p in pairs(c)))
        chosen.add(best)
        for pair in pairs(best):
            open_pairs.pop(pair, None)
    return Selection([cell for cell in valid if cell in chosen], possible - len(open_pairs), possible)
