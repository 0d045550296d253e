"""The oracle on real checkpoints: alter or drop each kind of key in turn, and it must go red and name it.

Protocol: train and save; a resume of the untouched checkpoint is exact; then,
for each kind of key of each file, one key is altered (or dropped), the mutated
checkpoint is resumed, and the oracle must object, or the load must fail.
Keys that upstream writes and never reads back into a run are listed with the
reason; a listed key that does turn the oracle red is taken off the list by the
test itself.
"""

import copy
import re
import shutil

import pytest
import torch

from resume import symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import RELEASE, Story

CELLS = [
    Cell("fp32", 0),
    Cell("fp16", 0, optimizer="adamw" if RELEASE == (0, 17) else "fused"),  # 0.17's takes no step
    Cell("bf16", 1, scheduler=True, lr=0.2),
    Cell("fp16", 2),
    Cell("bf16", 3),
    Cell("fp16", 1, model="moe"),
]

# kind of key (a pattern) -> why a resume need not notice when it is altered or dropped
UNREAD = {
    r"ds_config/.*|(.*/)?ds_version|checkpoint_parallel_dimensions/.*|mp_world_size": "says how the file was made",
    r"buffer_names.*|param_shapes/.*|shared_params.*|frozen_param_.*": "for zero_to_fp32, not for a resume",
    r".*/(param_slice_mappings|group_paddings|partition_count)(/.*)?|.*/zero_stage": "for a change of world size",
    r"dp_world_size|.*/dynamic_loss_scale|.*/overflow|sparse_tensor_module_names.*": "read only to be compared",
    r".*/scale_(factor|window)": "the configuration's, not the checkpoint's",
    r".*/loss_scaler": "an object; its numbers are keys of their own where a loss is scaled",
    r".*/(amsgrad|maximize|foreach|capturable|differentiable|fused|decoupled_weight_decay)": "torch puts its default",
    r"global_samples|.*/clip_grad": "where it is missing, counted or configured anew, to the same value",
    r"num_experts/.*|lr_scheduler": "compared with the model's, or absent",
}

# part of a key -> what the oracle must name when it is altered
NAMES = {
    "exp_avg": "moments",
    "/lr": "groups",
    "/weight_decay": "groups",
    "/betas": "groups",
    "/eps": "groups",
    "global_steps": "counters",
    "skipped_steps": "counters",
    "epoch": "client",
    "sampler": "client",
    "last_batch_iteration": "scheduler",
    "cur_scale": "scale",
    "module/": ("weights", "buffers"),
    "single_partition_of_fp32": "masters",
    "fp32_flat_groups": "masters",
    "fp32_groups_flat": "masters",
}


def leaves(value, path=()):
    """Every leaf of a checkpoint as (path, value), dicts and lists entered."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else None
    if items is None or not len(value):
        yield path, value
        return
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def kind(path) -> str:
    """A path with parameter names and numbers taken out: keys that are read alike are one kind."""
    return "/".join("#" if isinstance(p, int) else "*" if "." in str(p) else re.sub(r"\d+", "#", str(p)) for p in path)


def altered(value):
    if torch.is_tensor(value):
        return value + 1 if value.dtype != torch.bool else ~value
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return {"altered": 1} if isinstance(value, dict) else ["altered"] if isinstance(value, list) else "altered"


def mutate(document, path, how):
    """A copy of ``document`` with the key at ``path`` altered or dropped."""
    changed = copy.deepcopy(document)
    holder = changed
    trail = []
    for key in path[:-1]:
        trail.append((holder, key))
        holder = holder[key]
    if isinstance(holder, tuple):
        parent, key = trail[-1]
        holder = parent[key] = list(holder)
    if how == "dropped":
        del holder[path[-1]]
    else:
        holder[path[-1]] = altered(holder[path[-1]])
    return changed


@pytest.mark.guard
@pytest.mark.parametrize("cell", [pytest.param(c, id=c.id) for c in CELLS])
def test_every_kind_of_key_turns_the_oracle_red(pools, tmp_path, cell):
    whole = tmp_path / "whole"
    story = Story(pools, cell, whole).train_and_save(tag="t", more=1)
    story.check_full(story.resume(more=1))
    story.folder = str(tmp_path / "mutant")
    unseen, misnamed, tried, named = [], [], 0, set()
    for file in sorted((whole / "t").glob("*.pt")):
        document, seen = torch.load(file, map_location="cpu", weights_only=False), set()
        for path, value in leaves(document):
            this = kind(path)
            if (
                value is None
                or (torch.is_tensor(value) and not value.numel())
                or this in seen
                or any(re.fullmatch(pattern, this) for pattern in UNREAD)
            ):
                continue
            seen.add(this)
            for how in ("altered", "dropped"):
                shutil.rmtree(story.folder, ignore_errors=True)
                shutil.copytree(whole, story.folder)
                torch.save(mutate(document, path, how), f"{story.folder}/t/{file.name}")
                tried += 1
                try:
                    story.check_full(story.resume(more=1))
                except symptoms.Crash:
                    continue  # the load itself refused
                except symptoms.Symptom as error:
                    found = str(error)
                else:
                    unseen.append(f"{this} {how}")
                    continue
                for part, wanted in NAMES.items():
                    if how == "altered" and part in this:
                        named.add(part)
                        wanted = (wanted,) if isinstance(wanted, str) else wanted
                        if not any(f"rank 0: {w} " in found for w in wanted):
                            misnamed.append(f"{this}: {found}")
    assert not unseen, f"the oracle did not see {unseen}"
    assert not misnamed, f"the oracle saw another thing: {misnamed}"
    assert tried > 20 and len(named) >= 6, f"only {tried} mutations, {sorted(named)} named: the checkpoint was not read"
