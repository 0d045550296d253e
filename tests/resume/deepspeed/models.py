"""Tiny models and data for DeepSpeed runs: big enough to have every kind of state, small enough for 0.1 s a run."""

from __future__ import annotations

import torch

WIDTH, HIDDEN, BATCH = 16, 24, 4


class Norm(torch.nn.LayerNorm):
    """LayerNorm computed in fp32: torch 2.2 has no fp16 one on the CPU."""

    def forward(self, x):
        return torch.nn.functional.layer_norm(
            x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        ).to(x.dtype)


class Dense(torch.nn.Module):
    """[BATCH, WIDTH] -> [BATCH, WIDTH]: two linears around a norm, and a buffer that training moves."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.norm = Norm(HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("seen", torch.zeros(HIDDEN))

    def forward(self, x):
        h = torch.nn.functional.gelu(self.up(x))
        if self.training:
            self.seen += 1  # the same on every rank: a model file holds one rank's buffers
        return x + self.down(self.norm(h))


class Moe(torch.nn.Module):
    """``Dense`` with a DeepSpeed MoE layer (two experts, top-1, no random token selection) in its middle."""

    def __init__(self, ep_size: int):
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.moe = MoE(
            hidden_size=HIDDEN,
            expert=torch.nn.Linear(HIDDEN, HIDDEN),
            num_experts=2,
            ep_size=ep_size,
            k=1,
            min_capacity=BATCH,
            use_rts=False,
        )
        self.down = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        h, aux, _ = self.moe(torch.nn.functional.gelu(self.up(x)))
        return x + self.down(h) + 0.0 * aux.to(x.dtype)


class Based(torch.nn.Module):
    """``Dense`` by the names that it has in ``Lora``."""

    def __init__(self):
        super().__init__()
        self.base = Dense()

    def forward(self, x):
        return self.base(x)


class Lora(Based):
    """``Dense`` with all its parameters frozen and a trained adapter of rank 2 beside it."""

    def __init__(self):
        super().__init__()
        self.base.requires_grad_(False)
        self.lora_a = torch.nn.Linear(WIDTH, 2, bias=False)
        self.lora_b = torch.nn.Linear(2, WIDTH)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


class Tied(torch.nn.Module):
    """[BATCH, WIDTH] -> [BATCH, WIDTH]: the first and the last linear share one weight."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = Norm(WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x):
        return x + self.last(self.norm(torch.nn.functional.gelu(self.first(x))))


class FrozenMoe(Moe):
    """``Moe`` with a frozen linear and, in each expert, a frozen bias and a buffer of its own."""

    def __init__(self, ep_size: int):
        super().__init__(ep_size)
        self.up.requires_grad_(False)
        experts = self.moe.deepspeed_moe.experts.deepspeed_experts
        rank = torch.distributed.get_rank() if ep_size > 1 else 0
        for number, expert in enumerate(experts, rank * len(experts)):
            torch.nn.init.normal_(expert.bias, mean=number)
            expert.bias.requires_grad_(False)
            expert.register_buffer("number", torch.tensor([float(number)]))


_CLASSES = {"based": Based, "lora": Lora, "tied": Tied}


def make(kind: str, seed: int, world: int = 1) -> torch.nn.Module:
    """A fresh model of ``kind``, the same on every machine for one ``seed``.

    "dense"; "frozen": dense with its first linear frozen; "lora"; "based"; "tied"; "moe": experts over ``world`` ranks;
    "frozen-moe": with frozen parameters.
    """
    torch.manual_seed(seed)
    if kind in ("dense", "frozen"):
        model = Dense()
        model.up.requires_grad_(kind == "dense")
        return model
    if kind in ("moe", "frozen-moe"):
        return (Moe if kind == "moe" else FrozenMoe)(ep_size=world)
    if kind in _CLASSES:
        return _CLASSES[kind]()
    raise ValueError(f"no such model: {kind}")


def batch(step: int, rank: int, dtype: torch.dtype):
    """Inputs and targets, [BATCH, WIDTH] each, for one step of one rank."""
    generator = torch.Generator().manual_seed(1000 * (step + 1) + rank)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    y = torch.randn(BATCH, WIDTH, generator=generator)
    return x.to(dtype), y


def groups(model: torch.nn.Module, lr: float) -> list[dict]:
    """Two param groups that differ in lr and weight decay, so that a mix-up of groups shows."""
    decay = [p for n, p in model.named_parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and p.ndim <= 1]
    return [
        {"params": decay, "lr": lr, "weight_decay": 0.1, "name": "decay"},
        {"params": rest, "lr": lr / 2, "weight_decay": 0.0, "name": "rest"},
    ]
