"""What the ranks run: train and save, load and train on, and the reference that both are held against."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from resume.nemo import checkpoints, engines, models
from resume.nemo.engines import Cell
from resume.oracle import Snapshot
from resume.symptoms import StateDictChanged

STEPS, MORE = 3, 4


def train_and_save(
    cell: Cell,
    folder: str,
    ties: bool = False,
    stale: bool = False,
    sizes: dict[str, int] | None = None,
    **save,
) -> Snapshot:
    """Train from seed 1 and save; this rank's snapshot.

    ``ties``: put masters halfway between bf16 values first.  ``save``: see ``checkpoints.save``.
    ``stale``: leave a ``step`` in the saved param groups, as copying fused_adam's groups does.
    ``sizes``: those of ``models`` that are to be others.
    """
    with mock.patch.dict(vars(models), sizes or {}):
        engine = engines.build(cell, seed=1)
        engines.train(engine, 0, STEPS)
    if ties:
        engines.plant_ties(engine)
    if stale:
        for group in engine.optimizer.param_groups:
            group["step"] = 1
    checkpoints.save(engine, folder, **save)
    for group in engine.optimizer.param_groups if stale else ():
        del group["step"]
    return engines.snapshot(engine)


def resume(cell: Cell, folder: str, again: str | None = None, more: int = MORE, trained: int = 1) -> dict:
    """Build an engine from seed 2, with other hyperparameters, train it, load, and train on.

    The same state dict is loaded twice.  ``again``: a folder to save to straight after loading.
    Returns ``loaded`` and ``final`` snapshots.
    """
    engine = engines.build(replace(cell, hyper="target"), seed=2)
    engines.train(engine, 100, trained)
    checkpoint = checkpoints.load(engine, folder)
    loaded = engines.snapshot(engine)
    checkpoints.put(engine, checkpoint)
    if again:
        checkpoints.save(engine, again)
    twice = engines.snapshot(engine)
    engines.train(engine, STEPS, more)
    return {"loaded": loaded, "twice": twice, "final": engines.snapshot(engine)}


def load(cell: Cell, folder: str, more_on: int | None = None) -> None:
    """Build an engine from seed 2 and load.

    ``more_on``: a rank that asks for one more tensor, as one does that has other layers of a pipeline.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    engine, more = engines.build(replace(cell, hyper="target"), seed=2), {}
    if torch.distributed.get_rank() == more_on:
        more["another"] = ShardedTensor.from_rank_offsets("model.another_layer", torch.zeros(4))
    with torch.no_grad():
        checkpoint = checkpoints.read(engine, folder, **more)
    checkpoints.put(engine, checkpoint)


def load_unchanged(cell: Cell, folder: str) -> None:
    """Load, and raise ``StateDictChanged`` where that changes what it was handed."""
    engine = engines.build(replace(cell, hyper="target"), seed=2)
    with torch.no_grad():
        checkpoint = checkpoints.read(engine, folder)
    before = engines.freeze(checkpoint["optimizer_states"])
    checkpoints.put(engine, checkpoint)
    if engines.freeze(checkpoint["optimizer_states"]) != before:
        old, new = before[0], engines.freeze(checkpoint["optimizer_states"])[0]
        raise StateDictChanged(f"changed: {[k for k in {**old, **new} if old.get(k) != new.get(k)]}")


def reference(cell: Cell, saved: Snapshot, rounded: bool = False, more: int = MORE) -> Snapshot:
    """Go on with fused_adam, as ``cell`` is, from a snapshot, without loading a checkpoint.

    ``rounded``: with weights rounded half up after each step, as param remainders have them.
    """
    engine = engines.build(cell, seed=3)
    engines.assume(engine, saved)
    if rounded:
        engines.round_half_up(engine)
    engines.train(engine, STEPS, more, rounded)
    return engines.snapshot(engine)


def keys(folder: str) -> list[str]:
    """Keys of the tensors in a checkpoint."""
    from megatron.core import dist_checkpointing

    return sorted(dist_checkpointing.load_tensors_metadata(folder))
