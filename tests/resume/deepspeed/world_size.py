"""Rank functions for resumes at another world size: odd sizes, so that every partitioning pads, and state by name."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from resume import oracle
from resume.deepspeed import compat, engines, models, runs
from resume.deepspeed.engines import Cell
from resume.oracle import Snapshot
from resume.ranks import as_crash

ODD, FEW = 5, 3
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Case:
    """A save at ``saved`` ranks and a load at ``loaded``, everything else as ``cell`` says.

    ``frozen``: whether the first linear is frozen.  ``zero``: further settings of the ZeRO section.
    """

    saved: int
    loaded: int
    cell: Cell
    frozen: bool = False
    zero: tuple[tuple[str, object], ...] = ()

    @property
    def id(self) -> str:
        parts = [f"{self.saved}to{self.loaded}", self.cell.id.replace("-1r", "")]
        return "-".join(parts + ["frozen"] * self.frozen + [name.replace("_", "") for name, _ in self.zero])


class Odd(torch.nn.Module):
    """[BATCH, WIDTH] -> [BATCH, WIDTH] through ODD features; the last FEW parameters are a group of their own."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(models.WIDTH, ODD)
        self.norm = models.Norm(ODD)
        self.down = torch.nn.Linear(ODD, models.WIDTH)
        self.gain = torch.nn.Parameter(torch.ones(FEW))
        self.register_buffer("seen", torch.zeros(ODD))

    def forward(self, x):
        if self.training:
            self.seen += 1
        y = self.down(self.norm(torch.nn.functional.gelu(self.up(x))))
        return x + torch.cat([y[:, :FEW] * self.gain, y[:, FEW:]], dim=1)


def build(case: Case, seed: int):
    """A fresh engine with three param groups that differ in every hyperparameter AdamW has."""
    import deepspeed

    compat.reset()
    torch.manual_seed(seed)
    model = Odd()
    model.up.requires_grad_(not case.frozen)
    lr = case.cell.lr
    matrices, vectors = models.groups(model, lr)
    vectors["params"] = [p for p in vectors["params"] if p is not model.gain]
    groups = [
        {**matrices, "betas": (0.8, 0.9)},
        {**vectors, "eps": 1e-6},
        {"params": [model.gain], "lr": lr / 4, "weight_decay": 0.01, "name": "gain"},
    ]
    config = engines.config(case.cell)
    config["zero_optimization"].update(case.zero)
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=lr), config=config)[0]


def _flat_groups(engine) -> list[tuple[list, torch.Tensor]]:
    """Stages 1 and 2: each group's parameters in the order of the flat group, and this rank's partition of it.

    ``safe_get_full_optimizer_state`` and its like do not find the moments of every run, and the wrong parameter's
    under ``round_robin_gradients``.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "bf16_groups"):
        return list(zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True))
    return list(zip(optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True))


def _held(engine, partition, key: str) -> torch.Tensor:
    return partition.data if key == "fp32" else engine.optimizer.optimizer.state[partition][key]


def _full(engine, key: str) -> dict[str, torch.Tensor]:
    """Full masters (``key`` "fp32") or moments by name."""
    import deepspeed.comm as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    names, found = engine.param_names, {}
    if engine.zero_optimization_stage() == 3:
        for param in (p for group in engine.optimizer.fp16_groups for p in group):
            full = safe_get_full_fp32_param(param) if key == "fp32" else safe_get_full_optimizer_state(param, key)
            found[names[param]] = full.reshape(param.ds_shape).clone()
        return found
    for params, partition in _flat_groups(engine):
        own = _held(engine, partition, key).contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        pieces = torch.cat(parts)[: sum(p.numel() for p in params)].split([p.numel() for p in params])
        found.update((names[p], piece.view(p.shape).clone()) for p, piece in zip(params, pieces, strict=True))
    return found


def _set_full(engine, key: str, tensors: dict[str, torch.Tensor]) -> None:
    """Put full masters (``key`` "fp32") or moments by name into this rank's partitions; padding becomes zero."""
    import deepspeed.comm as dist

    names, rank, world = engine.param_names, dist.get_rank(), dist.get_world_size()
    if engine.zero_optimization_stage() == 3:  # safe_set_full_fp32_param fails where the last rank pads
        optimizer = engine.optimizer
        for params, partition in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            held, offset = _held(engine, partition, key).zero_(), 0
            for param in params:
                size = -(-param.ds_numel // world)
                own = tensors[names[param]].reshape(-1)[rank * size :][:size]
                held[offset : offset + own.numel()].copy_(own)
                offset += size
        return
    for params, partition in _flat_groups(engine):
        flat = torch.cat([tensors[names[p]].reshape(-1) for p in params])
        own = flat[rank * partition.numel() :][: partition.numel()]
        _held(engine, partition, key).zero_()[: own.numel()].copy_(own)


def state(engine, client=None) -> Snapshot:
    """The run's state without anything that depends on the world size: the same on every rank. Collective."""
    snap = engines.snapshot(engine, client)
    moments = {f"{name}.{key}": t for key in MOMENTS for name, t in _full(engine, key).items()}
    steps = {"steps": sorted(set(snap.step.values()))}
    return replace(oracle.without(snap, "partitions"), masters=_full(engine, "fp32"), moments=moments, step=steps)


def train_and_save(case: Case, folder: str) -> Snapshot:
    """Train, save, and return the state at the save."""
    engine = build(case, seed=1)
    engines.train(engine, case.cell, 0, runs.STEPS)
    engine.save_checkpoint(folder, client_state=dict(engines.CLIENT))
    return state(engine, engines.CLIENT)


def resume(case: Case, folder: str) -> dict:
    """Load into a freshly seeded engine and train on: ``loaded`` and ``final`` states, files ``opened`` meanwhile."""
    engine = build(case, seed=2)
    runs._opened = []
    try:
        _, client = engine.load_checkpoint(folder)
    finally:
        opened, runs._opened = sorted({os.path.basename(p) for p in runs._opened if p.startswith(folder)}), None
    loaded = state(engine, client)
    engines.train(engine, case.cell, runs.STEPS, runs.MORE)
    return {"loaded": loaded, "final": state(engine, client), "opened": opened}


def reference(case: Case, saved: Snapshot) -> Snapshot:
    """The final state of a run at this world size that ``saved`` was put into by hand, parameter by parameter."""
    import deepspeed

    engine = build(case, seed=3)
    engines.train(engine, case.cell, 200, 1)  # so that there are moments to set
    params = dict(engine.module.named_parameters())
    with torch.no_grad():
        _set_full(engine, "fp32", saved.masters)
        for key in MOMENTS:
            _set_full(engine, key, {name: saved.moments[f"{name}.{key}"] for name in saved.masters})
        gathered = list(params.values()) if case.cell.stage == 3 else []
        with deepspeed.zero.GatheredParameters(gathered, modifier_rank=0):
            for name, param in params.items():
                if param.numel():
                    param.copy_(saved.weights[name])
        for name, buffer in engine.module.named_buffers():
            buffer.copy_(saved.buffers[name])
    basic = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for entry in basic.state.values():
        entry["step"].fill_(saved.step["steps"][0])
    for i, group in enumerate(basic.param_groups):
        group.update({k: saved.groups[f"[{i}].{k}"] for k in group if k not in ("params", "step")})
    for name, value in saved.scale.items():
        holder, _, attribute = name.rpartition(".")
        setattr(getattr(engine.optimizer, holder) if holder else engine.optimizer, attribute, value)
    for name, value in saved.counters.items():
        setattr(engine, name, value)
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(dict(saved.scheduler))
    engines.train(engine, case.cell, runs.STEPS, runs.MORE)
    return state(engine, engines.CLIENT)


def refused(cell: Cell, folder: str) -> dict:
    """A load that must fail: the ``error``, and snapshots ``before`` and ``after`` it."""
    import deepspeed.comm as dist

    engine = engines.build(cell, seed=2)
    before, error = engines.snapshot(engine), None
    try:
        engine.load_checkpoint(folder)
    except Exception as raised:
        error = as_crash(raised, dist.get_rank())
    return {"error": error, "before": before, "after": engines.snapshot(engine)}
