"""Load modes: how a checkpoint is saved, what happens to it, and how it is loaded. Data, and how names are made of it.

A mode is a situation and a choice of flags: ``tag-int-noopt`` is an integer tag, loaded without optimizer states.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

FLAGS: dict[str, dict[str, bool]] = {
    "full": {},
    "noopt": {"load_optimizer_states": False},
    "module": {"load_module_only": True},
    "both": {"load_optimizer_states": False, "load_module_only": True},
    "nosched": {"load_lr_scheduler_states": False},
    "nosched-noopt": {"load_optimizer_states": False, "load_lr_scheduler_states": False},
}
FOUR = ("full", "noopt", "module", "both")
NO_OPTIMIZER_FILE = "the checkpoint lacks the optimizer states that are asked for"
NO_MODEL_FILE = "the checkpoint lacks the model file"
DAMAGED = "a file that the load needs is cut short"


@dataclass(frozen=True)
class Mode:
    """One load mode.

    ``setup``: fields of ``cells.Setup`` that both runs have.  ``into``: fields that only the loading engine has.
    ``steps``: before the save.  ``save``: arguments of save_checkpoint; ``tag``: the tag saved under.
    ``damage``: what is done to a copy of the checkpoint, each "verb:what".  ``trained``: steps of the loading engine
    before the load.  ``load``: arguments of load_checkpoint.  ``how``: native, universal, to32, save16, resave.
    ``lacks``: why the checkpoint cannot give what is asked for, so that a clear error is right; None: it must load.
    ``lacks_at``: the stages where that is so (None: every stage).
    """

    situation: str
    flags: str
    setup: dict[str, Any] = field(default_factory=dict)
    into: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    save: dict[str, Any] = field(default_factory=dict)
    tag: str | int | None = None
    damage: tuple[str, ...] = ()
    trained: int = 0
    load: dict[str, Any] = field(default_factory=dict)
    how: str = "native"
    lacks: str | None = None
    lacks_at: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return self.flags if self.situation == "plain" else f"{self.situation}-{self.flags}".removesuffix("-file")

    @property
    def arguments(self) -> dict[str, Any]:
        """What load_checkpoint is called with, but for the folder."""
        return {**FLAGS.get(self.flags, {}), **self.load}

    @property
    def optimizer(self) -> bool:
        """Whether optimizer states are asked for."""
        return not self.arguments.get("load_module_only") and self.arguments.get("load_optimizer_states", True)

    @property
    def scheduler(self) -> bool:
        return not self.arguments.get("load_module_only") and self.arguments.get("load_lr_scheduler_states", True)

    @property
    def counters(self) -> bool:
        return not self.arguments.get("load_module_only")


def _with(situation: str, flags: tuple[str, ...], **fields: Any) -> list[Mode]:
    return [Mode(situation, one, **fields) for one in flags]


def _files_gone(situation: str, damage: str, flags: tuple[str, ...] = FOUR) -> list[Mode]:
    """Optimizer files are gone or cut short: only loads that need them may refuse; ZeRO-3 keeps its weights there."""
    reason = NO_OPTIMIZER_FILE if damage.startswith("delete") else DAMAGED
    return [
        replace(mode, lacks=reason, lacks_at=None if mode.optimizer else (3,))
        for mode in _with(situation, flags, damage=(damage,))
    ]


def _modes() -> list[Mode]:
    sched = {"scheduler": True}
    found = [
        *_with("plain", FOUR),
        *_with("sched", (*FOUR, "nosched", "nosched-noopt"), setup=sched),
        # which tag
        *_with("tag-old", FOUR, damage=("later:newer",), tag="older", load={"tag": "older"}),
        *_with("tag-int", FOUR, tag=7, damage=("later:newer",), load={"tag": 7}),
        *_with("no-latest", FOUR, tag="only", damage=("delete:latest",), load={"tag": "only"}),
        *_with("not-latest", ("full",), tag="only", save={"save_latest": False}, load={"tag": "only"}),
        *_with("no-tag", ("full", "noopt"), damage=("delete:latest",), lacks="there is no latest file and no tag"),
        *_with("bad-tag", FOUR, load={"tag": "absent"}, lacks="there is no such tag"),
        *_with("no-folder", ("full",), damage=("delete:folder",), lacks="there is no such folder"),
        # which files
        *_files_gone("no-optim", "delete:optim"),
        *_files_gone("no-shard", "delete:shard"),
        *_files_gone("cut-optim", "cut:optim"),
        *_with("no-model", FOUR, damage=("delete:model",), lacks=NO_MODEL_FILE),
        *_with("cut-model", FOUR, damage=("cut:model",), lacks=DAMAGED),
        # other forms of the checkpoint
        *_with("universal", FOUR, how="universal"),
        *_with("universal-sched", ("full", "noopt", "nosched"), how="universal", setup=sched),
        *_with("universal-tag", ("full",), how="universal", damage=("delete:latest",), load={"tag": "universal"}),
        *[m for n in (1, 2, 3) for m in _with(f"universal-into-z{n}", ("full", "noopt"), how="universal",
                                              into={"stage": n})],
        *_with("unconverted", ("full",), into={"checkpoint": {"load_universal": True}},
               lacks="the checkpoint is not a universal one"),
        Mode("to32", "file", how="to32"),
        Mode("to32-tag", "file", how="to32", tag="older", damage=("later:newer",), load={"tag": "older"}),
        Mode("save16", "file", how="save16", setup={"zero": {"stage3_gather_16bit_weights_on_model_save": True}}),
        # written by another run
        *[m for n in (0, 1, 2, 3) for m in _with(f"into-z{n}", ("full", "noopt", "both"), into={"stage": n})],
        *[m for p in ("fp32", "bf16", "fp16")
          for m in _with(f"into-{p}", ("full", "noopt", "both"), into={"precision": p})],
        *_with("into-wide", ("full", "both"), into={"model": "wide"}, lacks="the parameters have other shapes"),
        *_with("into-more", ("full", "both"), into={"model": "more"}, lacks="the checkpoint lacks a parameter"),
        *_with("into-more-loose", ("both",), into={"model": "more"}, load={"load_module_strict": False}),
        *_with("into-frozen", ("noopt", "both"), into={"model": "frozen"}),
        *_with("from-frozen", ("noopt", "both"), setup={"model": "frozen"}, into={"model": "dense"}),
        # when
        *_with("step0", ("full", "noopt"), steps=0),
        *_with("accum", ("full", "noopt"), setup={"accum": 2}),
        *_with("trained", FOUR, trained=2),
        *_with("trained-sched", ("full", "noopt", "module"), trained=2, setup=sched),
        *_with("resave", FOUR, how="resave"),
        *_with("resave-sched", ("full", "noopt"), how="resave", setup=sched),
        # loss scale
        *_with("overflow", ("full", "noopt"), setup={"overflow": True}),
        *_with("static-scale", ("full", "noopt"), setup={"fp16": {"loss_scale": 128}}),
        # options
        *_with("loose", ("full", "both"), load={"load_module_strict": False}),
        *_with("custom", ("full", "both"), load={"custom_load_fn": True}),
        *_with("no-frozen", ("full", "both"), save={"exclude_frozen_parameters": True},
               lacks="the frozen parameters were left out of the checkpoint"),
        *_with("no-frozen-loose", ("full", "both"), save={"exclude_frozen_parameters": True},
               load={"load_module_strict": False}),
        *_with("tags-ignored", ("full",), setup={"checkpoint": {"tag_validation": "Ignore"}}),
        *_with("tags-checked", ("full",), setup={"checkpoint": {"tag_validation": "Fail"}}),
        *_with("node-local", ("full", "noopt"), setup={"checkpoint": {"use_node_local_storage": True}}),
        *_with("parallel-write", ("full",), setup={"checkpoint": {"parallel_write": {"pipeline_stage": True}}}),
        *_with("masters-low", ("full", "noopt", "both"), setup={"zero": {"load_from_fp32_weights": False}}),
        *_with("elastic", ("full", "noopt"), setup={"zero": {"elastic_checkpoint": True}}),
        *_with("gather16", ("full", "noopt", "module", "both"),
               setup={"zero": {"stage3_gather_16bit_weights_on_model_save": True}}),
        *_with("round-robin", ("full",), setup={"zero": {"round_robin_gradients": True}}),
        *_with("sub-groups", ("full", "noopt"), setup={"zero": {"sub_group_size": 100}}),
        *_with("universal-sub-groups", ("full",), how="universal", setup={"zero": {"sub_group_size": 100}}),
        *_with("pipelined-load", ("full",), setup={"zero": {"pipeline_loading_checkpoint": True}}),
    ]  # fmt: skip
    return found


MODES: dict[str, Mode] = {mode.name: mode for mode in _modes()}
