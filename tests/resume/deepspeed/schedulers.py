"""Rank functions for schedulers that a ``Cell`` does not name: torch's own, and DeepSpeed's OneCycle."""

from __future__ import annotations

import torch

from resume.deepspeed import compat, engines, models, runs
from resume.deepspeed.engines import Cell


def _make(name: str, optimizer):
    from deepspeed.runtime.lr_schedules import OneCycle

    return {
        "CosineAnnealingLR": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20),
        "LambdaLR": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 20),
        "OneCycle": lambda: OneCycle(optimizer, cycle_min_lr=1e-3, cycle_max_lr=1e-2, cycle_first_step_size=10),
    }[name]()


def _build(cell: Cell, seed: int, name: str):
    import deepspeed

    compat.reset()
    model = models.make(cell.model, seed, cell.world)
    optimizer = torch.optim.AdamW(models.groups(model, cell.lr), lr=cell.lr)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=engines.config(cell),
        lr_scheduler=lambda basic: _make(name, basic),
    )
    return engine


def save_and_resume(cell: Cell, folder: str, name: str, load: dict) -> dict:
    """Train, save and train on, then load into a new engine and train on.

    Returns ``saved_run`` and ``resumed``: snapshots ``loaded`` (at the save or the load) and ``final`` of each.
    """
    runs_ = {}
    for which, seed in (("saved_run", 1), ("resumed", 2)):
        engine = _build(cell, seed, name)
        if which == "saved_run":
            engines.train(engine, cell, 0, runs.STEPS)
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder, **load)
        loaded = engines.snapshot(engine)
        engines.train(engine, cell, runs.STEPS, runs.MORE)
        runs_[which] = {"loaded": loaded, "final": engines.snapshot(engine)}
    return runs_
