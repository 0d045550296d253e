"""Engines of a ``Setup``, how they train, and their ``Snapshot``s, as laid out on this rank or by name."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from resume.deepspeed import compat, engines, models
from resume.oracle import Snapshot

from matrix.cells import Setup, thawed

LR = {"sgd": 1e-1}


class Lora(torch.nn.Module):
    """A frozen linear with a trainable low-rank update beside it, around ``Dense``'s norm."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(models.WIDTH, models.WIDTH)
        self.base.requires_grad_(False)
        self.a = torch.nn.Linear(models.WIDTH, 4, bias=False)
        self.b = torch.nn.Linear(4, models.WIDTH, bias=False)
        self.norm = models.Norm(models.WIDTH)

    def forward(self, x):
        return self.norm(self.base(x) + self.b(self.a(x)))


class Tied(torch.nn.Module):
    """One linear used twice, under two names."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(models.WIDTH, models.WIDTH)
        self.norm = models.Norm(models.WIDTH)
        self.last = torch.nn.Linear(models.WIDTH, models.WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.norm(torch.nn.functional.gelu(self.first(x))))


class Buffers(models.Dense):
    """``Dense`` with buffers of other kinds: a counter, a running value in a submodule, and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.norm.register_buffer("running", torch.zeros(models.HIDDEN))
        self.register_buffer("constant", torch.ones(3), persistent=False)

    def forward(self, x):
        if self.training:
            self.count += 1
            self.norm.running.mul_(0.5).add_(1.0)
        return super().forward(x)


class Wide(models.Dense):
    """``Dense`` with the same names and other shapes."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(models.WIDTH, 2 * models.HIDDEN)
        self.norm = models.Norm(2 * models.HIDDEN)
        self.down = torch.nn.Linear(2 * models.HIDDEN, models.WIDTH)
        self.register_buffer("seen", torch.zeros(2 * models.HIDDEN))


class More(models.Dense):
    """``Dense`` and one more linear."""

    def __init__(self):
        super().__init__()
        self.more = torch.nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x):
        return self.more(super().forward(x))


class _Gelu(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x)


MADE = {"lora": Lora, "tied": Tied, "buffers": Buffers, "wide": Wide, "more": More, "groups3": models.Dense}


def _pipeline(stages: int):
    from deepspeed.pipe import PipelineModule

    layers = [
        torch.nn.Linear(models.WIDTH, models.HIDDEN),
        _Gelu(),
        models.Norm(models.HIDDEN),
        torch.nn.Linear(models.HIDDEN, models.WIDTH),
    ]
    return PipelineModule(
        layers=layers,
        num_stages=stages,
        loss_fn=lambda out, y: torch.nn.functional.mse_loss(out.float(), y),
        partition_method="uniform",
    )


def is_pipeline(setup: Setup) -> bool:
    return setup.model.startswith("pipe")


def _model(setup: Setup, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    if is_pipeline(setup):
        return _pipeline(2 if setup.model == "pipe2" else 1)
    if setup.model in MADE:
        return MADE[setup.model]()
    return models.make(setup.model, seed, setup.world)


def _groups(setup: Setup, model: torch.nn.Module, lr: float) -> list[dict]:
    groups = models.groups(model, lr)
    if setup.model == "groups3":
        last = groups[0]["params"].pop()
        groups.append({"params": [last], "lr": lr / 4, "weight_decay": 0.05, "name": "last"})
    if setup.model == "moe":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        return split(groups)
    return groups


def _optimizer(setup: Setup, groups: list[dict], lr: float):
    if setup.optimizer == "cpuadam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, lr=lr)
    if setup.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    return (torch.optim.Adam if setup.optimizer == "adam" else torch.optim.AdamW)(groups, lr=lr)


def _config(setup: Setup, lr: float) -> dict:
    cell = engines.Cell(
        precision=setup.precision,
        stage=setup.stage,
        world=setup.world,
        grad_accum="fp32" if setup.optimizer == "bf16opt" else None,
        lr=lr,
        scheduler=setup.scheduler,
    )
    config = engines.config(cell)
    config["gradient_accumulation_steps"] = setup.accum
    config["zero_optimization"].update(thawed(setup.zero))
    if setup.optimizer == "cpuadam":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if setup.checkpoint:
        config["checkpoint"] = thawed(setup.checkpoint)
    if setup.fp16:
        config["fp16"].update(thawed(setup.fp16))
    return config


def build(setup: Setup, seed: int, tensors: dict[str, torch.Tensor] | None = None):
    """A fresh engine. ``tensors``: weights and buffers by name that the module starts from instead of ``seed``'s."""
    import deepspeed

    compat.reset()
    lr = LR.get(setup.optimizer, 1e-2)
    model = _model(setup, seed)
    if tensors:
        model.load_state_dict(tensors, strict=False)  # a tied weight has one of its names only
    optimizer = _optimizer(setup, _groups(setup, model, lr), lr)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=_config(setup, lr))[0]


def train(engine, setup: Setup, start: int, steps: int) -> None:
    """Train optimizer steps ``start`` .. ``start + steps - 1``."""
    import deepspeed.comm as dist

    rank = 0 if setup.same or setup.model == "pipe2" else dist.get_rank()
    dtype = engines.DTYPES[setup.precision]
    engine.train()
    for step in range(start * setup.accum, (start + steps) * setup.accum):
        x, y = (t.to(engine.device) for t in models.batch(step, rank, dtype))
        if is_pipeline(setup):
            engine.train_batch(iter([(x, y)]))
            continue
        loss = torch.nn.functional.mse_loss(engine(x).float(), y)
        engine.backward(loss * float("inf") if setup.overflow and step == 1 else loss)
        engine.step()


def snapshot(engine, client=None) -> Snapshot:
    """This rank's snapshot, laid out as the optimizer holds it. Collective."""
    return engines.snapshot(engine, client)


def _stage0_states(engine) -> dict[str, dict]:
    """Optimizer state of the stage 0 wrappers by parameter name, as views."""
    optimizer, found = engine.optimizer, {}
    basic = getattr(optimizer, "optimizer", optimizer)
    names = {id(p): n for n, p in engine.module.named_parameters()}
    if hasattr(optimizer, "fp32_groups_flat"):
        for low, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            offset, state = 0, basic.state.get(flat, {})
            for param in low:
                end = offset + param.numel()
                found[names[id(param)]] = {
                    k: v[offset:end] if torch.is_tensor(v) and v.numel() == flat.numel() else v
                    for k, v in state.items()
                }
                offset = end
    elif hasattr(optimizer, "fp32_groups"):
        for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            found.update((names[id(p)], basic.state.get(m, {})) for p, m in zip(low, high, strict=True))
    else:
        found = {n: basic.state.get(p, {}) for n, p in engine.module.named_parameters()}
    return found


def _full_moment(engine, param, key: str) -> torch.Tensor | None:
    """One moment of one ZeRO 1 or 2 parameter, whole: [numel]. None where no rank's part has it. Collective.

    Not upstream's safe_get_full_optimizer_state: its fragments are links made at the first step, and a load may
    leave them behind.
    """
    import deepspeed.comm as dist

    buffer = torch.zeros(param.numel() + 1)
    if not hasattr(param, "_hp_mapping"):
        return None
    mapping = param._hp_mapping
    if mapping is not None:
        storage = mapping.hp_fragment.untyped_storage().data_ptr()
        flat = next((t for _, t in engines._partitions(engine) if t.untyped_storage().data_ptr() == storage), None)
        state = getattr(engine.optimizer, "optimizer", engine.optimizer).state.get(flat, {})
        if key in state:
            inside, place = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
            buffer[place.start : place.start + place.numel] = (
                state[key].flatten()[inside.start : inside.start + inside.numel].cpu()
            )
            buffer[-1] = 1.0
    dist.all_reduce(buffer, group=param._dp_group)  # the ranks that share the parameter
    return buffer[:-1] if buffer[-1] else None


def _full_moments(engine) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_optimizer_state

    basic = getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = [s for s in basic.state.values() if s]
    keys = sorted({k for s in states for k, v in s.items() if torch.is_tensor(v) and k != "step"})
    if not engines._has_hp_mapping(engine):
        return {f"{n}.{k}": s[k] for n, s in _stage0_states(engine).items() for k in keys if k in s}
    if engine.zero_optimization_stage() == 3:
        keys = [k for k in keys if all(k in s for s in states)]
        get = safe_get_full_optimizer_state
    else:
        keys = sorted({*keys, "exp_avg", "exp_avg_sq", "momentum_buffer"})  # the same collectives on every rank
        get = functools.partial(_full_moment, engine)
    named = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
    found = {f"{n}.{k}": get(p, k) for n, p in named for k in keys}
    return {name: full for name, full in found.items() if full is not None}


def by_name(engine, snap: Snapshot) -> Snapshot:
    """``snap`` in a form that does not depend on stage or world size: full moments by parameter, distinct steps.

    Collective. Every moment is [numel] fp32.
    """
    moments = {n: t.detach().to("cpu", torch.float32, copy=True).flatten() for n, t in _full_moments(engine).items()}
    return replace(snap, moments=moments, step={"distinct": sorted(set(snap.step.values()))}, partitions={})
