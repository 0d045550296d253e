"""Tiny pipelines: PipelineModules with a stage a rank, what trains them, and the plain model they are exported to."""

from __future__ import annotations

import torch

from resume.deepspeed import compat, engines, models
from resume.deepspeed.engines import Cell
from resume.oracle import Snapshot

KINDS = ("pipe", "pipe-frozen", "pipe-tied")


class Block(torch.nn.Module):
    """[BATCH, WIDTH] -> [BATCH, WIDTH]: a linear, a norm and a buffer that differs between blocks."""

    def __init__(self, number: int, frozen: bool = False):
        super().__init__()
        self.linear = torch.nn.Linear(models.WIDTH, models.WIDTH)
        self.norm = models.Norm(models.WIDTH).requires_grad_(not frozen)
        torch.nn.init.normal_(self.norm.bias, mean=number)
        self.register_buffer("number", torch.tensor([float(number)]))

    def forward(self, x):
        return x + self.norm(torch.nn.functional.gelu(self.linear(x)))


class Shared(torch.nn.Linear):
    """A linear that two layers of a pipeline share, with a buffer."""

    def __init__(self):
        super().__init__(models.WIDTH, models.WIDTH)
        self.register_buffer("number", torch.tensor([7.0]))


def _layers(kind: str) -> list:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    blocks = [LayerSpec(Block, number, kind == "pipe-frozen") for number in range(4)]
    if kind == "pipe-tied":
        ends = [TiedLayerSpec("shared", Shared, tied_weight_attr=["weight", "bias"]) for _ in range(2)]
        return [ends[0], *blocks[:2], ends[1]]
    return [*blocks[:2], torch.nn.functional.gelu, *blocks[2:]]


def _loss(out, y):
    return torch.nn.functional.mse_loss(out.float(), y)


def _make(kind: str, seed: int, stages: int) -> torch.nn.Module:
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(seed)
    return PipelineModule(_layers(kind), num_stages=stages, loss_fn=_loss, partition_method="uniform", base_seed=seed)


def plain_model(kind: str, seed: int) -> torch.nn.Module:
    """The layers by the names that a pipeline of one stage gives them."""
    torch.manual_seed(seed)
    model, shared = torch.nn.Module(), Shared()
    for number, layer in enumerate(_layers(kind)):
        if hasattr(layer, "key"):
            model.tied_modules = torch.nn.ModuleDict({"shared": shared})
        elif hasattr(layer, "build"):
            model.add_module(str(number), layer.build())
    return model


def train_and_save(cell: Cell, folder: str, seed: int = 1, steps: int = 3) -> Snapshot:
    """Train a pipeline with a stage on each of the cell's ranks and save it; this rank's snapshot."""
    import deepspeed

    compat.reset()
    model = _make(cell.model, seed, cell.world)
    optimizer = torch.optim.AdamW(models.groups(model, cell.lr), lr=cell.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=engines.config(cell))
    batches = iter([models.batch(step, 0, cell.dtype) for step in range(steps)])
    for _ in range(steps):
        engine.train_batch(batches)
    engine.save_checkpoint(folder)
    return Snapshot(
        weights=engines._weights(engine),
        buffers={n: engines._own(b) for n, b in engine.module.named_buffers()},
        masters=engines._masters(engine),
    )
