"""Build a model and its optimizer from a ``Cell``, train, save, load, and take ``Snapshot``s of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

from resume.nemo import compat, models
from resume.oracle import Snapshot

HYPER = {
    "source": {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": True},
    "target": {"lr": 0.3, "betas": (0.5, 0.6), "eps": 1e-2, "weight_decay": 0.7, "bias_correction": False},
}


@dataclass(frozen=True)
class Cell:
    """One way to train.

    ``model``: one of ``models.KINDS``.  ``optimizer``: fused (MainParamsOptimizerWrapper around Apex's FusedAdam) or
    distributed (MegatronDistributedFusedAdam).  ``masters``: where the latter keeps fp32 masters: "params", or
    "remainders" of the bf16 weights.  ``ep``: expert parallel size.  ``groups``: 2 or 3 param groups (with expert
    parallelism experts are the third).  ``hyper``: which of HYPER the optimizer is built with.
    ``order``: the order of the param groups.  ``decays``: whether every group of a target decays weights.
    False: its groups are told apart by that, as the source's are.
    ``lightning``: whether sharded state dicts are made by nemo.lightning.
    """

    model: str = "moe"
    optimizer: str = "fused"
    masters: str = "params"
    world: int = 1
    ep: int = 1
    groups: int = 2
    hyper: str = "source"
    order: tuple[int, ...] | None = None
    decays: bool = True
    lightning: bool = False

    @property
    def id(self) -> str:
        parts = [self.model, self.optimizer, f"{self.world}r"]
        parts += [self.masters] * (self.masters != "params") + [f"ep{self.ep}"] * (self.ep > 1)
        return "-".join(parts + ["3groups"] * (self.groups == 3))


@dataclass
class Engine:
    """``params``: the model's parameters by full name; ``order``: those names as the optimizer orders them."""

    cell: Cell
    model: torch.nn.Module
    optimizer: object
    params: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


def build(cell: Cell, seed: int) -> Engine:
    """A fresh model and optimizer."""
    from megatron.core import parallel_state

    model = models.make(cell.model, seed, cell.ep)
    if compat.on_gpu():
        model.cuda()
    first = parallel_state.get_expert_model_parallel_rank() * (models.EXPERTS // cell.ep) if cell.ep > 1 else 0
    params = {models.full_name(n, first): p for n, p in model.named_parameters()}
    groups = models.groups(model, cell.ep, cell.groups)
    if cell.order:
        groups = [groups[i] for i in cell.order]
    hyper = dict(HYPER[cell.hyper])
    if cell.hyper == "target":  # not one value of the source's, in any group
        for i, group in enumerate(groups):
            plain = group.get("weight_decay") == 0.0 and not cell.decays
            group.update(lr=hyper["lr"] + i, weight_decay=0.0 if plain else hyper["weight_decay"] + i)
    else:
        for i, group in enumerate(groups):
            group["lr"] = hyper["lr"] / (1 + i if group.get("weight_decay") == 0.0 or "lr_mult" in group else 1)
    names = {id(p): n for n, p in params.items()}
    order = [names[id(p)] for g in groups for p in g["params"]]
    if cell.optimizer == "fused":
        from apex.optimizers import FusedAdam

        optimizer = compat.wrap(FusedAdam(groups, **hyper))
    else:
        from nemo.core.optim.distributed_adam import MegatronDistributedFusedAdam

        optimizer = MegatronDistributedFusedAdam(
            groups,
            **hyper,
            dtype=torch.float32,
            grad_sync_dtype=torch.float32,
            bucket_cap_mb=0.005,
            param_sync_dtype=torch.bfloat16,
            store_params=cell.masters == "params",
            store_param_remainders=cell.masters == "remainders",
            overlap_grad_sync=False,
            **({} if compat.on_gpu() else {"device": "cpu"}),
        )
    return Engine(cell, model, optimizer, params, order)


def train(engine: Engine, start: int, steps: int, rounded: bool = False) -> list[float]:
    """Train on steps ``start`` .. ``start + steps - 1``; this rank's losses.

    ``rounded``: a fused run whose weights are its masters rounded half up, as param remainders have them.
    """
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(start, start + steps):
        engine.optimizer.zero_grad()
        loss = models.loss(engine.model, step, rank)
        loss.backward()
        if engine.cell.optimizer == "fused":
            _reduce_main_grads(engine)
        engine.optimizer.step()
        if rounded:
            round_half_up(engine)
        losses.append(loss.item())
    return losses


def _reduce_main_grads(engine: Engine) -> None:
    """What NeMo's training step does for fused_adam: fp32 gradients, averaged over data parallel ranks."""
    engine.optimizer.copy_model_grads_to_main_grads()
    for name, master in _fused_masters(engine).items():
        if engine.cell.world == 1:
            continue
        if engine.cell.ep == 1 or not models.is_expert(name):
            torch.distributed.all_reduce(master.grad)
        master.grad.div_(engine.cell.world)


def _fused_masters(engine: Engine) -> dict[str, torch.Tensor]:
    return dict(zip(engine.order, itertools.chain(*engine.optimizer.fp32_from_float16_groups), strict=False))


def round_half_up(engine: Engine) -> None:
    """Set a fused run's weights to its masters rounded half up."""
    with torch.no_grad():
        for name, master in _fused_masters(engine).items():
            engine.params[name].copy_(half_up(master))


def _own(tensor):
    return tensor.detach().to("cpu", copy=True)


def _plain(value):
    return _own(value) if torch.is_tensor(value) else value


def snapshot(engine: Engine) -> Snapshot:
    """This rank's state by parameter name: the same names and shapes for both optimizers."""
    optimizer = engine.optimizer
    weights = {n: _own(p) for n, p in engine.params.items()}
    if engine.cell.optimizer == "fused":
        masters = _fused_masters(engine)
        moments = {f"{n}.{k}": _own(v) for n, m in masters.items() for k, v in optimizer.state[m].items()}
        masters = {n: _own(m) for n, m in masters.items()}
        steps = {g["step"] for g in optimizer.param_groups if "step" in g}
        step = {"step": steps.pop() if len(steps) == 1 else sorted(steps)} if steps else {}
        ignored = ("params", "step")
    else:
        state = optimizer.state_dict()
        by_id = dict(zip(itertools.chain(*(g["params"] for g in state["param_groups"])), engine.order, strict=False))
        masters, moments = {}, {}
        for index, name in by_id.items():
            masters[name] = _own(state["state"][index]["param"])
            moments.update({f"{name}.{k}": _own(state["state"][index][k]) for k in ("exp_avg", "exp_avg_sq")})
        step, ignored = {"step": state["state"]["step"]}, ("params",)
    groups = {}
    names = iter(engine.order)
    for group in optimizer.param_groups:
        # by the parameters a group holds, so that groups in another order, or split further, compare
        for name in itertools.islice(names, len(group["params"])):
            groups.update({f"{name}.{k}": _plain(v) for k, v in group.items() if k not in ignored})
    return Snapshot(weights=weights, masters=masters, moments=moments, step=step, groups=groups)


def plant_ties(engine: Engine) -> None:
    """Put every fourth master halfway between two bf16 values; weights are those masters, half to even.

    Both directions of rounding occur, since the lower of the two is odd or even by chance.
    """
    state = engine.optimizer.state_dict()
    if engine.cell.optimizer == "fused":
        masters = _fused_masters(engine)
    else:
        ids = itertools.chain(*(g["params"] for g in state["param_groups"]))
        masters = {name: state["state"][i]["param"] for i, name in zip(ids, engine.order, strict=False)}
    with torch.no_grad():
        for name, master in masters.items():
            flat = master.view(-1)
            flat[::4] = ((flat[::4].contiguous().view(torch.int32) & -65536) | 0x8000).view(torch.float32)
            engine.params[name].copy_(master)
    if engine.cell.optimizer == "distributed":
        engine.optimizer.load_state_dict(state)


def half_up(master: torch.Tensor) -> torch.Tensor:
    """bf16 as param remainders have it: rounded half up."""
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def assume(engine: Engine, saved: Snapshot) -> None:
    """Set a fused engine to what a snapshot holds, without any code for checkpoints."""
    optimizer, masters = engine.optimizer, _fused_masters(engine)
    names = iter(engine.order)
    with torch.no_grad():
        for name, master in masters.items():
            engine.params[name].copy_(saved.weights[name])
            master.copy_(saved.masters[name])
            optimizer.state[master] = {
                k: saved.moments[f"{name}.{k}"].to(master.device, copy=True) for k in ("exp_avg", "exp_avg_sq")
            }
    for group in optimizer.param_groups:
        name, *_ = itertools.islice(names, len(group["params"]))  # all of them are used up
        group["step"] = saved.step["step"]
        for key in HYPER["source"]:
            group[key] = saved.groups[f"{name}.{key}"]


def freeze(value):
    """A tree as plain comparable data; tensors by their bytes."""
    if isinstance(value, dict):
        return {k: freeze(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [freeze(v) for v in value]
    return (str(value.dtype), _own(value).view(-1).view(torch.uint8).tolist()) if torch.is_tensor(value) else value
