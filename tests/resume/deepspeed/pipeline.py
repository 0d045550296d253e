"""Pipeline engines for the ranks: build, train, save and resume a small ``PipelineModule``."""

from __future__ import annotations

import itertools

import torch

from resume.deepspeed import compat, engines, models, runs
from resume.deepspeed.engines import Cell

LAYERS = (models.WIDTH, models.HIDDEN, models.HIDDEN, models.WIDTH)


def build(cell: Cell, seed: int, stages: int):
    """A fresh engine of ``stages`` pipeline stages; the rest of the ranks is data parallel."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    compat.reset()
    torch.manual_seed(seed)
    layers = [LayerSpec(torch.nn.Linear, *sizes) for sizes in itertools.pairwise(LAYERS)]
    model = PipelineModule(
        layers, num_stages=stages, loss_fn=loss, partition_method="uniform", activation_checkpoint_interval=0
    )
    optimizer = torch.optim.AdamW(models.groups(model, cell.lr), lr=cell.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=engines.config(cell))
    return engine


def loss(output, target):
    return torch.nn.functional.mse_loss(output.float(), target.float())


def train(engine, cell: Cell, start: int, steps: int) -> list[float]:
    """As ``engines.train``; a data parallel replica has its own batches."""
    replica = engine.grid.get_data_parallel_rank()
    batches = iter([models.batch(step, replica, cell.dtype) for step in range(start, start + steps)])
    return [engine.train_batch(data_iter=batches).item() for _ in range(steps)]


def train_and_save(cell: Cell, folder: str, stages: int) -> dict:
    """As ``runs.train_and_save``."""
    engine = build(cell, 1, stages)
    train(engine, cell, 0, runs.STEPS)
    engine.save_checkpoint(folder, client_state=dict(engines.CLIENT))
    saved = engines.snapshot(engine, engines.CLIENT)
    losses = train(engine, cell, runs.STEPS, runs.MORE)
    return {"saved": saved, "final": engines.snapshot(engine, engines.CLIENT), "losses": losses}


def resume(cell: Cell, folder: str, stages: int, load: dict) -> dict:
    """As ``runs.resume``."""
    engine = build(cell, 2, stages)
    fresh = engines.snapshot(engine)
    path, client = engine.load_checkpoint(folder, **load)
    loaded = engines.snapshot(engine, client)
    losses = train(engine, cell, runs.STEPS, runs.MORE)
    return {
        "fresh": fresh,
        "loaded": loaded,
        "final": engines.snapshot(engine, client),
        "losses": losses,
        "path": path,
    }
