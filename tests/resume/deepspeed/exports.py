"""Exports of a checkpoint: what DeepSpeed makes of it for a run without DeepSpeed, and what that must be."""

from __future__ import annotations

import re
import runpy
import unittest.mock
from collections.abc import Callable

import torch

from resume.deepspeed import models, pipes
from resume.deepspeed.engines import Cell
from resume.oracle import Snapshot

_EXPERT = re.compile(r"(?<=\.deepspeed_experts\.)\d+")
SHARED = {"tied": {"last.weight": "first.weight"}}


def _plain_model(cell: Cell) -> torch.nn.Module:
    """The cell's model as a run of one rank without DeepSpeed has it, from another seed."""
    return pipes.plain_model(cell.model, seed=2) if cell.model in pipes.KINDS else models.make(cell.model, seed=2)


def _from_files(convert: Callable, folder: str, **kwargs) -> dict:
    out = f"{folder}/out{torch.distributed.get_rank()}"
    convert(folder, out, max_shard_size=None, **kwargs)  # sharding wants a package that is not installed
    return torch.load(f"{out}/pytorch_model.bin", weights_only=True)


def _export(cell: Cell, folder: str, how: str, **kwargs) -> dict[str, torch.Tensor]:
    from deepspeed.utils import zero_to_fp32

    if how == "files":
        return _from_files(zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict, folder, **kwargs)
    if how == "script":
        script = runpy.run_path(f"{folder}/zero_to_fp32.py")
        return _from_files(script["convert_zero_checkpoint_to_fp32_state_dict"], folder, **kwargs)
    if how == "model":
        model = zero_to_fp32.load_state_dict_from_zero_checkpoint(_plain_model(cell), folder, **kwargs)
        return model.state_dict()
    if how == "debug":
        with unittest.mock.patch.object(zero_to_fp32, "debug", True):
            return zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, **kwargs)
    lazy = how == "lazy"
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=lazy, **kwargs)
    return {name: value.contiguous() for name, value in state.items()} if lazy else state


def export(cell: Cell, folder: str, how: str = "state dict", **kwargs) -> Snapshot:
    """Export the checkpoint in ``folder``; an export that names all the model's tensors is loaded, too.

    ``how``: "state dict", "lazy", "files", "script" (the copy in the checkpoint), "debug" or "model".  ``kwargs``: the
    exporter's own.  The snapshot has parameters, and what else the export holds, as fp32 weights; and buffers.
    """
    return _snapshot(cell, _export(cell, folder, how, **kwargs))


def _snapshot(cell: Cell, state: dict[str, torch.Tensor]) -> Snapshot:
    model = _plain_model(cell)
    if set(state) == set(model.state_dict()):  # what is missing or too much is the oracle's to name
        model.load_state_dict(state, strict=True)
    buffers = {n for n, _ in model.named_buffers()}
    return Snapshot(
        weights={n: t.float().clone() for n, t in state.items() if n not in buffers},
        buffers={n: t.float().clone() for n, t in state.items() if n in buffers},
    )


def expected(cell: Cell, saved: list[Snapshot], masters: bool = True, frozen: bool = True) -> Snapshot:
    """What an export of these ranks' save must hold: fp32 masters (or weights), frozen weights, buffers, by the
    names of a run of one rank.  ``frozen``: whether frozen parameters are to be in it."""
    weights, buffers = {}, {}
    for rank, snap in enumerate(saved):

        def name(local: str, first: int = rank * (2 // cell.world)) -> str:
            return _EXPERT.sub(lambda number: str(first + int(number.group())), local)

        for local, weight in snap.weights.items():
            if frozen or local in snap.masters:
                weights[name(local)] = (snap.masters.get(local, weight) if masters else weight).float()
        buffers.update({name(local): tensor.float() for local, tensor in snap.buffers.items()})
    weights.update({other: weights[one] for other, one in SHARED.get(cell.model, {}).items()})
    return Snapshot(weights=weights, buffers=buffers)


def read_16bit_model(cell: Cell, folder: str) -> Snapshot:
    """What save_16bit_model() wrote into ``folder``, as ``export`` gives it."""
    return _snapshot(cell, torch.load(f"{folder}/pytorch_model.bin", weights_only=False))
