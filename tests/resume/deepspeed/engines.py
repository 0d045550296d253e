"""Build DeepSpeed engines from a ``Cell`` and take ``Snapshot``s of them, whatever wrapper holds the masters."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from resume.deepspeed import compat, cpu_adam, models
from resume.oracle import Snapshot

GATE = "gate.wg.weight"
NODE_LOCAL = "use_node_local_storage"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cell:
    """One way to train.

    ``precision``: fp32, bf16, fp16.  ``stage``: ZeRO 0-3.  ``model``: as ``models.make``.
    ``optimizer``: adamw (torch), fused (DeepSpeed's FusedAdam), cpuadam (its CPUAdam, states offloaded).
    ``grad_accum``: None (the default) or "fp32", which picks BF16_Optimizer at stage 1.
    ``load_from_fp32``: the ZeRO option ``load_from_fp32_weights``.
    ``lr``: the first group's learning rate.  ``scheduler``: whether a WarmupLR scheduler runs.
    ``options``: further ones that are on, of the ZeRO section (``round_robin_gradients``, ``elastic_checkpoint``) or
    of the checkpoint section (``use_node_local_storage``).
    """

    precision: str = "bf16"
    stage: int = 1
    world: int = 1
    model: str = "dense"
    optimizer: str = "adamw"
    grad_accum: str | None = None
    load_from_fp32: bool | None = None
    lr: float = 1e-2
    scheduler: bool = False
    options: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        parts = [self.precision, f"z{self.stage}", f"{self.world}r"]
        parts += [self.model] * (self.model != "dense") + [self.optimizer] * (self.optimizer != "adamw")
        parts += [f"accum-{self.grad_accum}"] * (self.grad_accum is not None)
        parts += [f"fromfp32-{str(self.load_from_fp32).lower()}"] * (self.load_from_fp32 is not None)
        parts += ["scheduler"] * self.scheduler
        parts += [option.replace("_", "") for option in self.options]
        return "-".join(parts)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]


def config(cell: Cell) -> dict:
    """The DeepSpeed configuration of a cell."""
    small = 10_000  # the defaults allocate hundreds of megabytes and cost seconds on a CPU
    zero = {"stage": cell.stage, "reduce_bucket_size": small, "allgather_bucket_size": small}
    if cell.stage == 3:
        zero.update(
            stage3_prefetch_bucket_size=small,
            stage3_param_persistence_threshold=0,
            stage3_max_live_parameters=small,
            stage3_max_reuse_distance=small,
        )
    if cell.load_from_fp32 is not None:
        zero["load_from_fp32_weights"] = cell.load_from_fp32
    if cell.optimizer == "cpuadam":
        zero["offload_optimizer"] = {"device": "cpu"}
    zero.update({option: True for option in cell.options if option != NODE_LOCAL})
    result = {
        "train_micro_batch_size_per_gpu": models.BATCH,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if cell.precision == "bf16":
        result["bf16"] = {"enabled": True}
    if cell.precision == "fp16":
        result["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 2}
    if NODE_LOCAL in cell.options:
        result["checkpoint"] = {NODE_LOCAL: True}
    if cell.grad_accum:
        result["data_types"] = {"grad_accum_dtype": cell.grad_accum}
    if cell.scheduler:
        result["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": cell.lr, "warmup_num_steps": 20, "warmup_type": "linear"},
        }
    return result


def build(cell: Cell, seed: int, weights: dict[str, torch.Tensor] | None = None, cuda: bool = False):
    """A fresh engine. ``weights``: fp32 or 16-bit tensors by name that the module starts from instead of ``seed``'s."""
    import deepspeed

    compat.reset()
    model = models.make(cell.model, seed, cell.world)
    if weights is not None:
        missing = model.load_state_dict({n: t.to(torch.float32) for n, t in weights.items()}, strict=False)
        if missing.unexpected_keys or any(n in dict(model.named_parameters()) for n in missing.missing_keys):
            raise ValueError(f"weights do not fit the model: {missing}")
    groups = models.groups(model, cell.lr)
    if cell.model.endswith("moe"):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        groups = split(groups)
    if cell.optimizer == "fused":
        from deepspeed.ops.adam import FusedAdam

        optimizer = FusedAdam(groups, lr=cell.lr)
    elif cell.optimizer == "cpuadam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        cpu_adam.use()
        optimizer = DeepSpeedCPUAdam(groups, lr=cell.lr)
    else:
        optimizer = torch.optim.AdamW(groups, lr=cell.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(cell))
    return engine


def train(engine, cell: Cell, start: int, steps: int) -> list[float]:
    """Train on steps ``start`` .. ``start + steps - 1``; this rank's losses."""
    import deepspeed.comm as dist

    losses = []
    engine.train()
    for step in range(start, start + steps):
        x, y = models.batch(step, dist.get_rank(), cell.dtype)
        x, y = x.to(engine.device), y.to(engine.device)
        loss = torch.nn.functional.mse_loss(engine(x).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _own(tensor):
    return tensor.detach().to("cpu", copy=True)


def _partitions(engine) -> list[tuple[str, torch.Tensor]]:
    """This rank's fp32 master tensors as the optimizer steps them, whatever the wrapper."""
    optimizer = engine.optimizer
    for attribute in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups_flat_partition",
        "fp32_groups_flat",
    ):
        if hasattr(optimizer, attribute):
            return [(f"{attribute}[{i}]", t) for i, t in enumerate(getattr(optimizer, attribute))]
    if hasattr(optimizer, "fp32_groups"):
        return [
            (f"fp32_groups[{i}][{j}]", t) for i, group in enumerate(optimizer.fp32_groups) for j, t in enumerate(group)
        ]
    return [
        (f"param_groups[{i}][{j}]", t)
        for i, group in enumerate(optimizer.param_groups)
        for j, t in enumerate(group["params"])
    ]


def _stage0_masters(engine) -> dict[str, torch.Tensor]:
    """The fp32 masters of the stage 0 wrappers by parameter name: the very tensors, not copies."""
    optimizer, by_id = engine.optimizer, {}
    if hasattr(optimizer, "fp32_groups_flat"):
        for low, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            offset = 0
            for param in low:
                by_id[id(param)] = flat[offset : offset + param.numel()].view(param.shape)
                offset += param.numel()
    elif hasattr(optimizer, "fp32_groups"):
        for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            by_id.update((id(p), m) for p, m in zip(low, high, strict=True))
    else:
        by_id = {id(p): p for p in engine.module.parameters() if p.dtype == torch.float32}
    return {n: by_id[id(p)] for n, p in engine.module.named_parameters() if id(p) in by_id}


def _has_hp_mapping(engine) -> bool:
    # BF16_Optimizer is a ZeRO optimizer even where the configured stage is 0
    return engine.zero_optimization_stage() > 0 or type(engine.optimizer).__name__ == "BF16_Optimizer"


def _masters(engine) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    if not _has_hp_mapping(engine):
        return {n: _own(t) for n, t in _stage0_masters(engine).items()}
    masters = {}
    for name, param in engine.module.named_parameters():
        full = safe_get_full_fp32_param(param) if param.requires_grad else None
        if full is not None:
            masters[name] = _own(full.float().reshape(getattr(param, "ds_shape", param.shape)))
    return masters


def set_masters(engine, weights: dict[str, torch.Tensor]) -> None:
    """Make the fp32 masters exactly ``weights`` (full tensors by name).

    A new engine's are not: DeepSpeed allocates optimizer state by a step on zero gradients, which decays them.
    """
    from deepspeed.utils import safe_set_full_fp32_param

    with torch.no_grad():
        if not _has_hp_mapping(engine):
            for name, master in _stage0_masters(engine).items():
                master.copy_(weights[name].float())
            return
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                safe_set_full_fp32_param(param, weights[name].float().to(engine.device))


def _weights(engine) -> dict[str, torch.Tensor]:
    import deepspeed

    params = dict(engine.module.named_parameters())
    low = next((p.dtype for n, p in params.items() if not n.endswith(GATE)), torch.float32)
    gather = deepspeed.zero.GatheredParameters if engine.zero_optimization_stage() == 3 else contextlib.nullcontext
    with gather(list(params.values())):
        # <= 0.12 turns a gate's weight to fp32 in its first forward; until then it has the model's dtype
        return {n: _own(p).to(low) if n.endswith(GATE) else _own(p) for n, p in params.items()}


def _plain(value):
    if torch.is_tensor(value):
        return _own(value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _scale(optimizer) -> dict:
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "dynamic_loss_scale")
    found = {n: getattr(optimizer, n) for n in names if hasattr(optimizer, n)}
    for holder in ("loss_scaler", "loss_scale_config"):
        for name, value in getattr(getattr(optimizer, holder, None), "__dict__", {}).items():
            if isinstance(value, (int, float, bool)):
                found[f"{holder}.{name}"] = value
    return found


def snapshot(engine, client=None) -> Snapshot:
    """This rank's ``Snapshot``. Collective: every rank must call it. ``client``: what load_checkpoint returned."""
    optimizer = engine.optimizer
    basic = getattr(optimizer, "optimizer", optimizer)
    moments, step = {}, {}
    for label, tensor in _partitions(engine):
        for key, value in basic.state.get(tensor, {}).items():
            if key == "step":
                step[label] = float(value)
            elif torch.is_tensor(value):
                moments[f"{label}.{key}"] = _own(value)
    for i, group in enumerate(basic.param_groups):
        if "step" in group:
            step[f"param_groups[{i}]"] = float(group["step"])
    return Snapshot(
        weights=_weights(engine),
        buffers={n: _own(b) for n, b in engine.module.named_buffers()},
        masters=_masters(engine),
        partitions={label: _own(t) for label, t in _partitions(engine)},
        moments=moments,
        step=step,
        groups={
            "clip_grad": getattr(optimizer, "clip_grad", None),
            **{
                f"[{i}].{k}": _plain(v)
                for i, g in enumerate(basic.param_groups)
                for k, v in g.items()
                if k not in ("params", "step")
            },
        },
        scheduler=_plain(engine.lr_scheduler.state_dict()) if engine.lr_scheduler is not None else {},
        counters={n: getattr(engine, n) for n in ("global_steps", "global_samples", "skipped_steps")},
        scale=_scale(optimizer) if engine.fp16_enabled() else {},
        client=_plain({k: v for k, v in (client or {}).items() if k in CLIENT}),
    )


CLIENT = {"epoch": 3, "sampler": {"seed": 17, "seen": [1, 2, 3]}}
