"""Rank functions for tests of fresh optimizers that ``runs`` has no use for."""

from __future__ import annotations

from dataclasses import replace

from resume.deepspeed import compat, engines, models, runs
from resume.deepspeed.engines import Cell
from resume.oracle import Snapshot


def save_16bit_model(cell: Cell, folder: str, seed: int = 1) -> Snapshot:
    """Train, gather the full weights into ``folder``/pytorch_model.bin, and return this rank's snapshot."""
    engine = engines.build(cell, seed)
    engine._config.zero_config.gather_16bit_weights_on_model_save = True
    engines.train(engine, cell, 0, runs.STEPS)
    if not engine.save_16bit_model(folder):
        raise RuntimeError("save_16bit_model() saved nothing")
    return engines.snapshot(engine)


def client_state(cell: Cell, folder: str, load: dict) -> dict:
    """The client state that load_checkpoint returns."""
    return engines.build(cell, seed=2).load_checkpoint(folder, **load)[1]


def load_without_optimizer(cell: Cell, folder: str, load: dict) -> Snapshot:
    """Weights and buffers of an engine that has no optimizer, as for inference, after the load."""
    import deepspeed

    compat.reset()
    engine, *_ = deepspeed.initialize(model=models.make(cell.model, 2, cell.world), config=engines.config(cell))
    engine.load_checkpoint(folder, **load)
    return Snapshot(weights=engines._weights(engine), buffers=dict(engine.module.named_buffers()))


def reference(cell: Cell, weights: list[dict]) -> dict:
    """``runs.reference`` for models whose masters <= 0.12 cannot set by name, such as experts.

    Engines allocate optimizer state by a step on zero gradients, which decays the masters unless lr is 0.
    """
    import deepspeed.comm as dist

    engine = engines.build(replace(cell, lr=0.0), seed=3, weights=weights[dist.get_rank()])
    for group in getattr(engine.optimizer, "optimizer", engine.optimizer).param_groups:
        group["lr"] = cell.lr if group["weight_decay"] else cell.lr / 2  # as models.groups gives them
    fresh = engines.snapshot(engine)
    losses = engines.train(engine, cell, runs.STEPS, runs.MORE)
    return {"fresh": fresh, "final": engines.snapshot(engine), "losses": losses}
