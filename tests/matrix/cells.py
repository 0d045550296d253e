"""Cells: which ways to train, save and resume there are, their ids, and the rules that leave some out."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from matrix.modes import MODES, Mode

AXES: dict[str, tuple] = {
    "precision": ("fp32", "bf16", "fp16"),
    "stage": (0, 1, 2, 3),
    "model": ("dense", "frozen", "lora", "tied", "groups3", "buffers", "moe", "pipe", "pipe2"),
    "optimizer": ("adamw", "adam", "sgd", "cpuadam", "bf16opt"),
    "ranks": ("1", "2", "1to2", "2to1"),
    "mode": tuple(MODES),
}


def _frozen(value: Any) -> Any:
    """A nested dict as something that hashes."""
    return tuple((k, _frozen(v)) for k, v in sorted(value.items())) if isinstance(value, dict) else value


def thawed(value: Any) -> Any:
    return {k: thawed(v) for k, v in value} if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Setup:
    """One way to train, as an engine is built of it.

    ``same``: every rank sees the same batches, so that runs at other world sizes compute the same.
    ``zero``, ``checkpoint``, ``fp16``: more of those sections of the configuration, as sorted pairs.
    """

    precision: str
    stage: int
    model: str
    optimizer: str
    world: int
    scheduler: bool = False
    accum: int = 1
    overflow: bool = False
    same: bool = False
    zero: tuple = ()
    checkpoint: tuple = ()
    fp16: tuple = ()

    def but(self, changes: dict[str, Any]) -> Setup:
        return replace(self, **{key: _frozen(value) for key, value in changes.items()})


@dataclass(frozen=True)
class Cell:
    """One way to resume. ``ranks``: the world size, or the one saved at and the one loaded at."""

    precision: str
    stage: int
    model: str
    optimizer: str
    ranks: str
    mode: str

    @property
    def id(self) -> str:
        return f"{self.precision}-z{self.stage}-{self.model}-{self.optimizer}-{self.ranks}-{self.mode}"

    @functools.cached_property
    def how(self) -> Mode:
        return MODES[self.mode]

    @property
    def worlds(self) -> tuple[int, int]:
        """The world size saved at, and loaded at."""
        return int(self.ranks[0]), int(self.ranks[-1])

    @functools.cached_property
    def saved_by(self) -> Setup:
        made = Setup(self.precision, self.stage, self.model, self.optimizer, self.worlds[0])
        return made.but({"same": self.worlds[0] != self.worlds[1], **self.how.setup})

    @functools.cached_property
    def loaded_by(self) -> Setup:
        more = {"checkpoint": {"load_universal": True}} if self.how.how == "universal" else {}
        return self.saved_by.but({"world": self.worlds[1], **more, **self.how.into})

    @property
    def into_stage(self) -> int:
        """The loading engine's stage; as ``loaded_by``'s, but cheap: rules ask for it many thousand times."""
        return self.how.into.get("stage", self.stage)

    @property
    def same_layout(self) -> bool:
        """Whether the loading engine cuts its states as the saving one did."""
        one, other = self.saved_by, self.loaded_by
        return all(getattr(one, f) == getattr(other, f) for f in ("precision", "stage", "model", "world", "optimizer"))


NAMES = tuple(field.name for field in fields(Cell))


class Rule(NamedTuple):
    """Cells that are left out: ``reason`` says what upstream documents, or why the cell is another one already."""

    name: str
    reason: str
    applies: Callable[[Cell, tuple[int, ...]], bool]


RULES: tuple[Rule, ...] = (
    Rule(
        "pipeline-zero",
        "upstream's PipelineEngine asserts that ZeRO-2 and ZeRO-3 are incompatible with pipelines",
        lambda c, v: c.model.startswith("pipe") and max(c.stage, c.into_stage) > 1,
    ),
    Rule(
        "pipeline-ranks",
        "pipe2 has its two stages on two ranks; a pipeline's stages are a layout, not a number of data-parallel ranks",
        lambda c, v: c.model == "pipe2" and c.ranks != "2",
    ),
    Rule(
        "pipeline-option",
        "parallel_write.pipeline_stage is for pipelines",
        lambda c, v: c.how.situation == "parallel-write" and not c.model.startswith("pipe"),
    ),
    Rule(
        "pipeline-accumulation",
        "a pipeline's micro batches are its accumulation: train_batch runs them all",
        lambda c, v: c.how.situation in ("accum", "overflow") and c.model.startswith("pipe"),
    ),
    Rule(
        "pipeline-custom",
        "upstream asserts that custom_load_fn is not supported with pipelines, whose layers have a file each",
        lambda c, v: c.how.situation == "custom" and c.model.startswith("pipe"),
    ),
    Rule(
        "moe-zero3",
        "upstream documents MoE layers for ZeRO stages 0-2",
        lambda c, v: c.model == "moe" and 3 in (c.stage, c.into_stage),
    ),
    Rule(
        "moe-ranks",
        "the experts of the made model are spread over all ranks: another world size is another expert parallel size",
        lambda c, v: c.model == "moe" and len(c.ranks) > 1,
    ),
    Rule(
        "offload-stages",
        "offload_optimizer is an option of ZeRO stages 1-3",
        lambda c, v: c.optimizer == "cpuadam" and 0 in (c.stage, c.into_stage),
    ),
    Rule(
        "offload-moe",
        "upstream asserts against CPU offload of expert groups whose moments its kernel keeps",
        lambda c, v: c.optimizer == "cpuadam" and c.model in ("moe", "pipe", "pipe2"),
    ),
    Rule(
        "bf16-optimizer",
        "BF16_Optimizer is bf16 at stage 1 with fp32 gradient accumulation",
        lambda c, v: c.optimizer == "bf16opt"
        and not (c.precision == c.how.into.get("precision", "bf16") == "bf16" and c.stage == c.into_stage == 1),
    ),
    Rule(
        "bf16-optimizer-moe",
        "upstream refuses BF16_Optimizer for MoE models",
        lambda c, v: c.optimizer == "bf16opt" and c.model == "moe",
    ),
    Rule(
        "universal-stage0",
        "universal checkpoints are made of ZeRO checkpoints and read by ZeRO optimizers",
        lambda c, v: (c.how.how == "universal" or c.how.situation == "unconverted")
        and 0 in (c.stage, c.into_stage),
    ),
    Rule(
        "universal-early",
        "universal checkpoints are for BF16_Optimizer before 0.14.3, and for ZeRO-3 since 0.15.4",
        lambda c, v: (c.how.how == "universal" or c.how.situation == "unconverted")
        and ((v < (0, 14, 3) and c.optimizer != "bf16opt") or (v < (0, 15, 4) and 3 in (c.stage, c.into_stage))),
    ),
    Rule(
        "universal-moe",
        "upstream documents no universal checkpoints of its own MoE layers",
        lambda c, v: c.how.how == "universal" and c.model == "moe",
    ),
    Rule(
        "export-stage0",
        "zero_to_fp32 is for ZeRO checkpoints: a stage 0 model file holds full weights",
        lambda c, v: c.how.how == "to32" and c.stage == 0,
    ),
    Rule(
        "zero3-save16",
        "save_16bit_model of a pipeline is not documented: each layer has a file of its own",
        lambda c, v: c.how.how == "save16" and c.model.startswith("pipe"),
    ),
    Rule("fp16-scale", "only fp16 has a loss scale",
         lambda c, v: c.how.situation in ("overflow", "static-scale") and c.precision != "fp16"),
    Rule(
        "same-written",
        "written by its own stage or precision is the plain load",
        lambda c, v: any(k in ("stage", "precision") and c.how.into[k] == getattr(c, k) for k in c.how.into)
        and c.how.how == "native",
    ),
    Rule(
        "other-model",
        "modes that change the model start from the dense one",
        lambda c, v: (c.how.situation.startswith(("into-wide", "into-more", "into-frozen", "from-frozen")))
        and c.model != "dense",
    ),
    Rule(
        "other-model-ranks",
        "modes that change model, stage or precision do not change the world size too, but for universal checkpoints",
        lambda c, v: bool(c.how.into or "model" in c.how.setup) and c.how.how == "native" and len(c.ranks) > 1,
    ),
    Rule(
        "nothing-frozen",
        "exclude_frozen_parameters is for models that have some",
        lambda c, v: c.how.situation.startswith("no-frozen") and c.model not in ("frozen", "lora"),
    ),
    Rule(
        "zero-option",
        "options of the ZeRO section, at stages that read them",
        lambda c, v: (c.how.situation in ("gather16", "sub-groups", "universal-sub-groups", "pipelined-load")
                      and c.stage != 3)
        or (c.how.situation in ("masters-low", "elastic", "round-robin") and c.stage == 0),
    ),
    Rule(
        "one-shard",
        "one of several optimizer files is gone: there are several at two ranks",
        lambda c, v: c.how.situation == "no-shard" and c.worlds[0] == 1,
    ),
)  # fmt: skip


def all_cells() -> Iterator[Cell]:
    """Every combination of the axes, before rules."""
    for values in itertools.product(*(AXES[name] for name in NAMES)):
        yield Cell(*values)


@functools.cache
def valid(version: tuple[int, ...]) -> tuple[tuple[Cell, ...], dict[str, int]]:
    """The cells that no rule leaves out for a release, and how many each rule does (a cell counts for the first)."""
    kept, dropped = [], dict.fromkeys((rule.name for rule in RULES), 0)
    for cell in all_cells():
        rule = next((r for r in RULES if r.applies(cell, version)), None)
        if rule:
            dropped[rule.name] += 1
        else:
            kept.append(cell)
    return tuple(kept), dropped


def is_core(cell: Cell) -> bool:
    """Whether the default selection has the cell whatever the pairs: the dense model with AdamW, one or two ranks."""
    return (cell.model, cell.optimizer) == ("dense", "adamw") and cell.ranks in ("1", "2")


def matching(cells: Iterable[Cell], patterns: str) -> list[Cell]:
    """Cells whose id matches one of the comma-separated shell patterns."""
    wanted = [p.strip() for p in patterns.split(",") if p.strip()]
    names = {p for p in wanted if not set("*?[") & set(p)}
    shapes = [re.compile(fnmatch.translate(p)) for p in wanted if p not in names]
    return [c for c in cells if c.id in names or any(shape.match(c.id) for shape in shapes)]
