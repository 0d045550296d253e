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
from resume.deepspeed.story import Story

CELLS = [Cell("fp32", 0), Cell("fp16", 0), Cell("fp16", 0, optimizer="fused"), Cell("bf16", 1), Cell("fp16", 2),
         Cell("bf16", 3), Cell("bf16", 1, grad_accum="fp32"), Cell("bf16", 2, scheduler=True), Cell("bf16", 0, model="moe")]

# kind of key -> why a load need not notice it
UNREAD = {}


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
    story = Story(pools, cell, whole).train_and_save(tag="t")
    story.check_full(story.resume())
    story.folder = str(tmp_path / "mutant")
    missed, tried = [], 0
    for file in sorted((whole / "t").glob("*.pt")):
        document = torch.load(file, map_location="cpu", weights_only=False)
        seen = set()
        for path, value in leaves(document):
            if value is None or kind(path) in seen or not path:
                continue
            seen.add(kind(path))
            for how in ("altered", "dropped"):
                shutil.rmtree(story.folder, ignore_errors=True)
                shutil.copytree(whole, story.folder)
                torch.save(mutate(document, path, how), f"{story.folder}/t/{file.name}")
                tried += 1
                try:
                    story.check_full(story.resume())
                except symptoms.Symptom as error:
                    found = str(error)
                else:
                    missed.append((kind(path), how))
    print(tried, missed)
    assert not missed
