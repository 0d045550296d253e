"""What a load must leave behind: for every field of a ``Snapshot``, what it equals and where it was seen to differ.

With optimizer states, everything is the save's.  Without, weights and buffers are the save's, the fp32 masters are
the loaded weights or the checkpoint's own masters, and everything else is as it was in the engine before the load.
Scheduler and counters are the save's where they were asked for, else as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from resume import oracle
from resume.deepspeed import engines
from resume.oracle import Difference, Snapshot

from matrix.cells import Cell

# further steps at another stage or world size: kernels round the ends of differently cut tensors differently
TOLERANCE = 1e-5
# by model, what the names of frozen parameters begin with
FROZEN = {"frozen": "up.", "lora": "base."}
FURTHER = ("weights", "masters", "partitions", "moments", "step", "groups", "scale")


@dataclass(frozen=True)
class State:
    """``saved``: the saving engine's view. ``before``, ``loaded``: the loading engine's, before and after the load."""

    cell: Cell
    saved: Snapshot
    before: Snapshot
    loaded: Snapshot


def same_run(cell: Cell) -> bool:
    """Whether a full load goes on exactly as the run that saved."""
    low = not dict(cell.loaded_by.zero).get("load_from_fp32_weights", True)
    if cell.how.save.get("exclude_frozen_parameters"):
        return False  # the frozen weights are the loading engine's own
    if cell.model.startswith("pipe") and cell.precision == "bf16" and (cell.stage == 0) != (cell.into_stage == 0):
        return False  # without ZeRO these sum their gradients in fp32, with it in bf16
    return cell.how.scheduler and not low and not set(cell.how.into) - {"stage", "checkpoint"}


def has_reference(cell: Cell) -> bool:
    """Whether a new run from the loaded weights says what follows a load without optimizer states.

    Not where the loading engine has trained, or the model is a pipeline or has experts, whose masters have no names.
    """
    mode = cell.how
    return not (mode.optimizer or mode.trained or cell.model in ("moe", "pipe", "pipe2") or mode.into.get("model"))


def _cast(tensors: dict, like: dict) -> dict:
    return {n: t.to(like[n].dtype) if n in like else t for n, t in tensors.items()}


def after_load(state: State) -> tuple[list[Difference], bool]:
    """What is not as it must be right after the load, and whether the masters are the checkpoint's own."""
    cell, mode = state.cell, state.cell.how
    saved, before, loaded = state.saved, state.before, state.loaded
    into = cell.loaded_by
    own = replace(
        saved,
        weights={**before.weights, **_cast(saved.weights, loaded.weights)},
        buffers={**before.buffers, **_cast(saved.buffers, loaded.buffers)},
    )
    if mode.save.get("exclude_frozen_parameters"):
        kept = {n: t for n, t in before.weights.items() if n.startswith(FROZEN[cell.model])}
        own = replace(own, weights={**own.weights, **kept})
    own = replace(own, scheduler=saved.scheduler if mode.scheduler else before.scheduler)
    if not mode.counters:
        own = replace(own, counters=before.counters)
    if into.precision != cell.saved_by.precision:
        better = {**saved.weights, **saved.masters}
        better = {**before.weights, **_cast(better, loaded.weights)}
        if mode.optimizer or all(torch.equal(better[n], t) for n, t in loaded.weights.items() if n in better):
            own = replace(own, weights=better)
        own = replace(own, scale=before.scale)
    if mode.optimizer:
        if into.precision != cell.saved_by.precision and cell.saved_by.precision == "fp32":
            own = replace(own, masters={n: saved.masters.get(n, saved.weights[n]) for n in loaded.masters})
        return _masters_low(own, state), True
    fresh = replace(
        own, moments=before.moments, step=before.step, scale=before.scale, groups=_groups(saved, before, mode)
    )
    exact = not oracle.differences(saved, loaded, only={"partitions"} if saved.partitions else {"masters"})
    found = oracle.differences(fresh, loaded, only=set(oracle.KINDS) - {"masters", "partitions"})
    return sorted([*found, *_stale(loaded)], key=lambda d: list(oracle.KINDS).index(d.kind)), exact


def _masters_low(own: Snapshot, state: State) -> list[Difference]:
    """``load_from_fp32_weights=False``: masters from the 16-bit weights, or exact all the same; never anything else."""
    found = oracle.differences(own, state.loaded)
    if dict(state.cell.loaded_by.zero).get("load_from_fp32_weights", True):
        return found
    rest = [d for d in found if d.kind not in ("masters", "partitions")]
    return rest if len(rest) == len(found) else [*rest, *_stale(state.loaded)]


def _groups(saved: Snapshot, before: Snapshot, mode) -> dict:
    """A new optimizer's groups; where the scheduler was loaded, with the learning rates that it had set."""
    if not (mode.scheduler and saved.scheduler):
        return before.groups
    return {k: saved.groups.get(k, v) if k.endswith(".lr") else v for k, v in before.groups.items()}


def _stale(loaded: Snapshot) -> list[Difference]:
    """Masters that, rounded, are not the weights."""
    found = []
    for name, weight in loaded.weights.items():
        master = loaded.masters.get(name)
        if master is None:
            continue
        rounded = master.to(weight.dtype).reshape(weight.shape)
        if not torch.equal(rounded, weight):
            by = (master.double().reshape(weight.shape) - weight.double()).abs().max().item()
            found.append(Difference("masters", name, f"rounded they are not the weights, by up to {by:.3g}", by))
    return found


def further(want: Snapshot, final: Snapshot, cell: Cell) -> tuple[list[Difference], bool]:
    """What the further steps made otherwise, in another layout by more than ``TOLERANCE``, and whether all is exact."""
    found = oracle.differences(want, final, only=set(FURTHER))
    if cell.same_layout:
        return found, not found
    # 16-bit weights are their masters rounded: a master that differs by nothing to speak of can flip a last bit
    compared = set(FURTHER) - ({"weights"} if final.masters and cell.loaded_by.precision != "fp32" else set())
    return oracle.differences(want, final, only=compared, tolerance=TOLERANCE), not found


def exported(weights: dict, buffers: dict, found, dtype: torch.dtype | None = None) -> list[Difference]:
    """A state dict that was exported: every weight and every buffer that is saved, by name, and nothing else."""
    found = {n: t.contiguous() for n, t in found.items()}
    want = Snapshot(weights=weights, buffers={n: t for n, t in buffers.items() if n != "constant"})
    have = Snapshot(
        weights={n: t for n, t in found.items() if n not in buffers},
        buffers={n: t.to(buffers[n].dtype) for n, t in found.items() if n in buffers},
    )
    tied = {n for n in have.weights if n not in weights and n.startswith("last.")}
    have = replace(have, weights={n: t for n, t in have.weights.items() if n not in tied})
    return oracle.differences(want, have)


def start_from(engine, loaded: Snapshot, own_masters: bool) -> None:
    """Give a new engine the masters and moments of ``loaded``, a snapshot in its own layout.

    Masters are the loaded weights, or with ``own_masters`` exactly the loaded masters. Moments, because DeepSpeed
    allocates them by a step on zero gradients, which leaves SGD's weight decay of the first weights in them.
    """
    engines.set_masters(engine, {**loaded.weights, **(loaded.masters if own_masters else {})})
    basic = getattr(engine.optimizer, "optimizer", engine.optimizer)
    with torch.no_grad():
        for label, tensor in engines._partitions(engine):
            if own_masters:
                tensor.copy_(loaded.partitions[label])
            for key, value in basic.state.get(tensor, {}).items():
                if f"{label}.{key}" in loaded.moments:
                    value.copy_(loaded.moments[f"{label}.{key}"])
