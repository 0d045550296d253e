"""What the ranks run: train and save, load and train on, and the reference that a load is held against.

Every function is called on all ranks through ``resume.ranks.Ranks`` and
returns plain data.  ``start`` is the global step at which training goes on,
so that a resumed run and its reference see the same batches.
"""

from __future__ import annotations

import os
import sys

import torch

from resume.deepspeed import engines
from resume.deepspeed.engines import Cell

STEPS, MORE = 3, 3
_opened: list[str] | None = None


def _audit(event: str, args: tuple) -> None:
    if _opened is not None and event == "open" and isinstance(args[0], str):
        _opened.append(args[0])


sys.addaudithook(_audit)


def train_and_save(
    cell: Cell, folder: str, tag=None, seed: int = 1, steps: int = STEPS, more: int = MORE, save: dict | None = None
) -> dict:
    """Train ``steps`` from ``seed``, save under ``tag``, train ``more``.

    Returns snapshots ``saved`` (at the save) and ``final`` (after ``more``), and the ``losses`` of the latter steps.
    """
    engine = engines.build(cell, seed)
    engines.train(engine, cell, 0, steps)
    engine.save_checkpoint(folder, tag=tag, client_state=dict(engines.CLIENT), **(save or {}))
    saved = engines.snapshot(engine, engines.CLIENT)
    losses = engines.train(engine, cell, steps, more)
    return {"saved": saved, "final": engines.snapshot(engine, engines.CLIENT), "losses": losses}


def resume(
    cell: Cell,
    folder: str,
    load: dict | None = None,
    seed: int = 2,
    start: int = STEPS,
    more: int = MORE,
    trained: int = 0,
) -> dict:
    """Build a freshly seeded engine, load, train on.

    ``trained``: steps to train before the load.  Returns ``fresh``, ``loaded`` and ``final`` snapshots, ``losses``,
    the ``path`` that load_checkpoint returned and the files ``opened`` under ``folder`` during the load.
    """
    global _opened
    engine = engines.build(cell, seed)
    if trained:
        engines.train(engine, cell, 100, trained)
    fresh = engines.snapshot(engine)
    _opened = []
    try:
        path, client = engine.load_checkpoint(folder, **(load or {}))
    finally:
        opened, _opened = sorted({os.path.relpath(p, folder) for p in _opened if p.startswith(folder)}), None
    loaded = engines.snapshot(engine, client)
    losses = engines.train(engine, cell, start, more)
    return {
        "fresh": fresh,
        "loaded": loaded,
        "final": engines.snapshot(engine, client),
        "losses": losses,
        "path": path,
        "opened": opened,
    }


def gradients_left(cell: Cell) -> float:
    """The largest absolute gradient that is left in this rank's module after a step."""
    engine = engines.build(cell, 1)
    engines.train(engine, cell, 0, 1)
    return max((p.grad.abs().max().item() for p in engine.module.parameters() if p.grad is not None), default=0.0)


def reference(
    cell: Cell,
    weights: list[dict],
    partitions: list[dict] | None = None,
    start: int = STEPS,
    more: int = MORE,
    counters: dict | None = None,
) -> dict:
    """A new run that starts from ``weights`` (full tensors by name, one dict a rank), with a fresh optimizer.

    This is what a load without optimizer states must equal.  ``partitions``: fp32 masters to put in place of the
    rounded weights, where the checkpoint holds better ones.  Returns ``fresh`` and ``final`` snapshots, ``losses``.
    """
    import deepspeed.comm as dist

    rank = dist.get_rank()
    engine = engines.build(cell, seed=3, weights=weights[rank])
    engines.set_masters(engine, weights[rank])
    if partitions is not None:
        own = dict(engines._partitions(engine))
        with torch.no_grad():
            for label, tensor in partitions[rank].items():
                own[label].copy_(tensor)
    fresh = engines.snapshot(engine)
    losses = engines.train(engine, cell, start, more)
    return {"fresh": fresh, "final": engines.snapshot(engine), "losses": losses}
