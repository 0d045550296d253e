"""Universal checkpoints: what the ranks run, and the stories that the tests hold against the oracle.

Protocol
1. a run trains, saves, and trains on: the *uninterrupted* run;
2. the checkpoint is converted with ``ds_to_universal``, called as from a shell;
3. a freshly seeded engine with ``load_universal`` in its configuration loads and trains on;
4. everything the load was asked for equals the save, everything else a new engine's; at the same world size
   the further steps equal the uninterrupted run's.

At another world size every rank must show what rank 0 saved: weights, buffers, full masters and full moments by
parameter name, step, hyperparameters, scheduler, counters, loss scale and client state.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from unittest import mock

import torch

from resume import oracle, symptoms
from resume.deepspeed import compat, engines, models
from resume.deepspeed.engines import Cell
from resume.deepspeed.runs import MORE, STEPS
from resume.deepspeed.story import FRESH, RELEASE, Story

TAG, CONVERTED = "saved", "converted"
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, amsgrad=True),
    "momentum": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
}
# 0.17 and 0.18 link parameters to a moment, in place of their fp32 weights, after a full load outside ZeRO-3
LINK_LOST = RELEASE in ((0, 17), (0, 18))
# what holds the fp32 weights: tests of other faults take no notice of the link where it is lost
HELD = {"partitions"} if LINK_LOST else {"masters", "partitions"}


@dataclass(frozen=True)
class UniversalCell(Cell):
    """A ``Cell`` of the optimizers above, or "muon"; models also "pair", "odd", "tied", "counted".

    ``groups``: how many param groups.  ``sub_group``: elements of a ZeRO-3 sub-group, None for one a param group.
    """

    groups: int = 2
    sub_group: int | None = None

    @property
    def id(self) -> str:
        return (
            super().id
            + f"-{self.groups}groups" * (self.groups != 2)
            + f"-sub{self.sub_group}" * (self.sub_group is not None)
        )


class Counted(models.Dense):
    """``Dense`` with an integer buffer beyond bf16's precision, and one that is saved as extra state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(1_000_001))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def get_extra_state(self):
        return self.scratch.clone()

    def set_extra_state(self, state):
        self.scratch = state.clone()

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.scratch += 1
        return super().forward(x)


class Pair(torch.nn.Module):
    """Two linears without buffers, [BATCH, WIDTH] -> [BATCH, WIDTH].

    ``tied``: they share their weight.  ``inner``: the width between them; an odd one brings padding, which ZeRO-3
    leaves uninitialized, so that its partitions compare by parameter only.
    """

    def __init__(self, tied: bool = False, inner: int = models.WIDTH):
        super().__init__()
        self.first = torch.nn.Linear(models.WIDTH, inner)
        self.second = torch.nn.Linear(inner, models.WIDTH)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        return x + self.second(torch.nn.functional.gelu(self.first(x)))


def _model(cell: Cell, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    if cell.model in ("pair", "odd", "tied"):
        return Pair(tied=cell.model == "tied", inner=models.WIDTH + (cell.model == "odd"))
    return Counted() if cell.model == "counted" else models.make(cell.model, seed, cell.world)


def _groups(model: torch.nn.Module, cell: UniversalCell) -> list[dict]:
    """``cell.groups`` param groups, each with a learning rate and weight decay of its own."""
    if cell.groups == 1:
        return [{"params": [p for p in model.parameters() if p.requires_grad], "lr": cell.lr, "weight_decay": 0.1}]
    groups = models.groups(model, cell.lr)
    if cell.groups == 3:
        last = groups[0]["params"].pop()
        groups.append({"params": [last], "lr": cell.lr / 4, "weight_decay": 0.05, "name": "last"})
    return groups


def build(cell: UniversalCell, seed: int, universal: bool = False, weights: dict | None = None):
    """A fresh engine of ``cell``; ``universal``: one that loads universal checkpoints.

    ``weights``: fp32 tensors by parameter name that the model and its masters start from instead of ``seed``'s.
    """
    import deepspeed

    compat.reset()
    model, config, optimizer = _model(cell, seed), engines.config(cell), None
    groups = _groups(model, cell)
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    if universal:
        config["checkpoint"] = {"load_universal": True}
    if cell.sub_group:
        config["zero_optimization"]["sub_group_size"] = cell.sub_group
    if cell.optimizer == "muon":
        config["optimizer"] = {"type": "Muon", "params": {"lr": cell.lr, "momentum": 0.9}}
        config["zero_optimization"]["reduce_scatter"] = False
    elif cell.optimizer == "fused":
        from deepspeed.ops.adam import FusedAdam

        optimizer = FusedAdam(groups, lr=cell.lr)
    else:
        optimizer = OPTIMIZERS[cell.optimizer](groups, lr=cell.lr)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=None if optimizer else groups, config=config
    )
    if weights is not None:
        engines.set_masters(engine, weights)
    return engine


def _snapshot(engine, client=None) -> oracle.Snapshot:
    """``engines.snapshot`` with moments in fp32: a load widens Muon's bf16 momentum, whatever the checkpoint."""
    snapshot = engines.snapshot(engine, client)
    return replace(snapshot, moments={name: moment.float() for name, moment in snapshot.moments.items()})


def _full_moments(engine) -> dict[str, torch.Tensor]:
    """The optimizer's moments as full tensors by "parameter.key", whatever the number of ranks. Collective."""
    from deepspeed.utils import safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # linked once, after the first group's first step, when the other groups have no states yet
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    keys = sorted({k for s in engine.optimizer.state.values() for k, v in s.items() if torch.is_tensor(v) and v.dim()})
    return {
        f"{name}.{key}": engines._own(safe_get_full_optimizer_state(param, key).reshape(-1))
        for name, param in engine.module.named_parameters()
        for key in keys
        if param.requires_grad
    }


def train_and_save(cell: UniversalCell, folder: str, steps: int = STEPS, full: bool = False) -> dict:
    """Train ``steps``, save under ``TAG``, train ``MORE``.

    Returns snapshots ``saved`` and ``final``, and with ``full`` the full ``moments`` at the save.
    """
    engine = build(cell, seed=1)
    engines.train(engine, cell, 0, steps)
    engine.save_checkpoint(folder, tag=TAG, client_state=dict(engines.CLIENT))
    saved, moments = _snapshot(engine, engines.CLIENT), _full_moments(engine) if full else {}
    engines.train(engine, cell, STEPS, MORE)
    return {"saved": saved, "moments": moments, "final": _snapshot(engine, engines.CLIENT)}


def convert(folder: str) -> None:
    """Convert ``TAG`` to ``CONVERTED`` as ``ds_to_universal`` does from a shell, on one rank and in its process.

    A model that is not Megatron's brings no universal_checkpoint_info, which --inject_missing_state is for.
    """
    from deepspeed.checkpoint import ds_to_universal

    options = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    folders = ["--input_folder", f"{folder}/{TAG}", "--output_folder", f"{folder}/{CONVERTED}"]
    with mock.patch.object(sys, "argv", ["ds_to_universal", *folders, *options]):
        ds_to_universal.main(ds_to_universal.parse_arguments())


def resume(cell: UniversalCell, folder: str, load: dict | None = None, trained: int = 0, full: bool = False) -> dict:
    """Build a freshly seeded engine, load the universal checkpoint, train on.

    ``trained``: steps to train before the load.  Returns snapshots ``fresh``, ``loaded`` and ``final``, the ``path``
    that load_checkpoint returned, and with ``full`` the full ``moments`` after the load.
    """
    engine = build(cell, seed=2, universal=True)
    engines.train(engine, cell, 100, trained)
    fresh = _snapshot(engine)
    path, client = engine.load_checkpoint(folder, **(load or {}))
    loaded, moments = _snapshot(engine, client), _full_moments(engine) if full else {}
    engines.train(engine, cell, STEPS, MORE)
    final = _snapshot(engine, client)
    return {"fresh": fresh, "loaded": loaded, "moments": moments, "final": final, "path": path}


def reference(cell: UniversalCell, masters: list[dict]) -> oracle.Snapshot:
    """The end of a new run from fp32 ``masters`` (full tensors by name, one dict a rank), over the later batches."""
    import deepspeed.comm as dist

    engine = build(cell, seed=3, weights=masters[dist.get_rank()])
    engines.train(engine, cell, STEPS, MORE)
    return _snapshot(engine)


class UniversalStory(Story):
    """One cell's runs and its conversion, in one folder; loads may be on other ranks than the save."""

    def __init__(self, pools, cell: UniversalCell, folder):
        super().__init__(pools, cell, folder)
        self.pools = pools

    def train_and_save(self, **kwargs) -> UniversalStory:
        self.trained = self.ranks.run(f"{__name__}:train_and_save", cell=self.cell, folder=self.folder, **kwargs)
        self.pools(1).run(f"{__name__}:convert", folder=self.folder)
        moved = oracle.moved([r["saved"] for r in self.trained], [r["final"] for r in self.trained])
        if moved < 1e-3:
            raise AssertionError(f"the run moves its weights by only {moved}: it cannot show anything")
        return self

    def resume(self, load: dict | None = None, cell: UniversalCell | None = None, **kwargs) -> list[dict]:
        cell = cell or self.cell
        resumed = self.pools(cell.world).run(f"{__name__}:resume", cell=cell, folder=self.folder, load=load, **kwargs)
        if any(r["path"] is None for r in resumed):
            raise symptoms.NothingLoaded(f"load_checkpoint({load}) returned no path")
        return resumed

    def check_elsewhere(self, resumed: list[dict]) -> None:
        """A full load on another number of ranks: each has everything that does not depend on that number."""
        saved = replace(self.saved[0], partitions={}, moments=self.trained[0]["moments"])
        loaded = [replace(r["loaded"], partitions={}, moments=r["moments"]) for r in resumed]
        oracle.check([saved] * len(loaded), loaded, what=f"after the load on {len(loaded)} ranks")

    def check_weights(self, resumed: list[dict], counters: bool, as_symptom: dict | None = None) -> None:
        """A load without optimizer states: weights, buffers and exact masters, and all the rest as before the load.

        Then the further steps are those of a new run from these masters.  ``counters``: whether global_steps were
        asked for.  ``as_symptom``: given where the engine had trained before the load; no new run is like it then.
        """
        loaded, what = [r["loaded"] for r in resumed], "after the load"
        oracle.check(self.saved, loaded, only={"weights", "buffers", *HELD}, what=what)
        before, rest = [r["fresh"] for r in resumed], {"moments", "step", "groups", "scale"}
        oracle.check(before, loaded, only=rest, as_symptom=FRESH if as_symptom is None else as_symptom, what=what)
        oracle.check(self.saved if counters else before, loaded, only={"counters"}, what=what)
        if as_symptom is None:
            masters = [s.masters for s in self.saved]
            self.check_final(self.ranks.run(f"{__name__}:reference", cell=self.cell, masters=masters), resumed)
