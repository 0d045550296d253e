"""A fresh optimizer on loaded weights: with optimizer files to leave alone, and without any, as after a conversion."""
from __future__ import annotations

import glob
import os
import re

import pytest
import torch

from resume import oracle, symptoms
from resume.deepspeed import models
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import BOTH, FRESH, NOOPT, Story, cells
from resume.symptoms import crash

LOADS = {"noopt": NOOPT, "both": BOTH}
TAG = "converted"


def params(cells_and_loads, *marks):
    """One pytest parameter for each (cell, name of a load)."""
    return [pytest.param(cell, LOADS[load], id=f"{cell.id}-{load}", marks=marks) for cell, load in cells_and_loads]


def write_model(folder, content: dict, name: str = "mp_rank_00_model_states.pt") -> None:
    """A checkpoint folder as a converter leaves it: ``latest`` and one model file, no optimizer files."""
    os.makedirs(os.path.join(folder, TAG))
    torch.save(content, os.path.join(folder, TAG, name))
    with open(os.path.join(folder, "latest"), "w") as file:
        file.write(TAG)


def state_dict(snapshot: oracle.Snapshot) -> dict[str, torch.Tensor]:
    """What a converter has of a model: full weights and buffers by name."""
    return {**snapshot.weights, **snapshot.buffers}


def remove_optimizer_files(folder) -> None:
    """Delete every optimizer file below ``folder``; there must be some."""
    files = glob.glob(os.path.join(folder, "*", "*optim_states.pt"))
    assert files, f"no optimizer files in {folder}"
    for file in files:
        os.remove(file)


def start(pools, cell: Cell, folder, load: dict, saved: list[oracle.Snapshot]) -> list[dict]:
    """Load ``folder`` into a new engine of ``cell`` and hold it against ``saved`` and a new run from there."""
    story = Story(pools, cell, folder)
    resumed = story.resume(load)
    for result in resumed:
        result["loaded"] = oracle.without(result["loaded"], "client")
    story.check_weights_only(resumed, counters=False, saved=[oracle.without(s, "client") for s in saved])
    story.check_no_optimizer_file(resumed)
    return resumed


# --- the optimizer files are there, and are to be left alone ---

# pristine 0.12.6 refreshes the masters in one case: fp16 with load_module_only
RIGHT = [(c, "both") for c in cells(("fp16",), (1, 2, 3))]
WRONG = [(c, load) for c in cells(stages=(1, 2, 3)) for load in LOADS if (c, load) not in RIGHT]
WRONG += [(Cell("bf16", 1, w, grad_accum="fp32", load_from_fp32=f), load)
          for w in (1, 2) for f in (None, False) for load in LOADS]
WRONG += [(Cell(p, 2, 2, load_from_fp32=False), "noopt") for p in ("bf16", "fp16", "fp32")]
WRONG += [(Cell("bf16", s, 1, optimizer="fused"), "noopt") for s in (1, 2, 3)]


def masters_follow(pools, cell, folder, load) -> None:
    story = Story(pools, cell, folder).train_and_save()
    resumed = story.resume(load)
    story.check_weights_only(resumed, counters=load is NOOPT)
    if cell.stage < 3:  # ZeRO-3 has its weights nowhere else
        story.check_no_optimizer_file(resumed)


@pytest.mark.fault("fresh-optimizer-masters", symptom=symptoms.MastersStale)
@pytest.mark.parametrize("cell, load", params(WRONG))
def test_masters_follow_loaded_weights(pools, tmp_path, cell, load):
    masters_follow(pools, cell, tmp_path, load)


@pytest.mark.guard
@pytest.mark.parametrize("cell, load", params(RIGHT))
def test_masters_follow_loaded_weights_in_fp16(pools, tmp_path, cell, load):
    masters_follow(pools, cell, tmp_path, load)


@pytest.mark.fault("fresh-optimizer-masters", symptom=symptoms.MastersStale)
@pytest.mark.parametrize("load", [pytest.param(load, id=name) for name, load in LOADS.items()])
@pytest.mark.parametrize("cell", [pytest.param(c, id=c.id) for c in cells(("bf16", "fp32"), (1, 2), model="moe")])
def test_masters_follow_loaded_weights_of_experts(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path).train_and_save()
    resumed = story.resume(load)
    check_experts(story, resumed)


def check_experts(story: Story, resumed: list[dict]) -> None:
    """As ``Story.check_weights_only``, by this rank's partitions: <= 0.12 cannot name the masters of experts."""
    loaded = [r["loaded"] for r in resumed]
    oracle.check(story.saved, loaded, only={"weights"}, what="after the load")
    reference = story.ranks.run("resume.deepspeed.fresh:reference", cell=story.cell,
                                weights=[s.weights for s in story.saved])
    fresh = [r["fresh"] for r in reference]
    oracle.check(fresh, loaded, only={"partitions", "moments", "step", "groups", "scale"}, as_symptom=FRESH,
                 what="after the load")
    oracle.check([r["final"] for r in reference], [r["final"] for r in resumed], only={"weights", "moments"},
                 as_symptom=dict.fromkeys(("weights", "moments"), symptoms.Diverged), what="training on")
    story.check_no_optimizer_file(resumed)


# --- there are no optimizer files ---

# what a model file without DeepSpeed's bookkeeping meets at stages 0-2, and what ZeRO-3 makes of another's file name
NOT_LOADED = (crash("KeyError"), crash("AssertionError"))


@pytest.mark.fault("fresh-optimizer-no-files", symptom=NOT_LOADED)
@pytest.mark.parametrize("cell, load", params([(c, load) for c in cells() for load in LOADS
                                               if c.world == 1 or load == "both"]))
def test_bare_model_file_loads(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path / "trained").train_and_save()
    write_model(tmp_path / "bare", {"module": state_dict(story.saved[0])})
    start(pools, cell, tmp_path / "bare", load, [story.saved[0]] * cell.world)


@pytest.mark.fault("fresh-optimizer-no-files", symptom=NOT_LOADED)
@pytest.mark.parametrize("cell", [pytest.param(Cell("bf16", s, 1, scheduler=True), id=f"z{s}") for s in range(4)])
def test_bare_model_file_leaves_a_new_scheduler_alone(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path / "trained").train_and_save()
    write_model(tmp_path / "bare", {"module": state_dict(story.saved[0])})
    resumed = start(pools, cell, tmp_path / "bare", NOOPT, story.saved)
    oracle.check([r["fresh"] for r in resumed], [r["loaded"] for r in resumed], only={"scheduler"})


@pytest.mark.fault("fresh-optimizer-no-files", symptom=(crash("KeyError"), crash("AssertionError")))
@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("stage", range(4))
def test_converted_model_starts_training_in_bf16(pools, tmp_path, stage, world):
    """A model made without DeepSpeed: its fp32 weights in a folder, then bf16 training from them."""
    model = models.make("dense", seed=11)
    write_model(tmp_path, {"module": model.state_dict()})
    cell = Cell("bf16", stage, world)
    weights = {n: p.detach().to(torch.bfloat16) for n, p in model.named_parameters()}
    buffers = {n: b.to(torch.bfloat16) for n, b in model.named_buffers()}
    resumed = start(pools, cell, tmp_path, BOTH, [oracle.Snapshot(weights=weights, buffers=buffers)] * world)
    assert oracle.moved([r["loaded"] for r in resumed], [r["final"] for r in resumed]) > 1e-3, "it did not train"


def from_stage_2(pools, cell, tmp_path, folder):
    """The model file that ZeRO-2 saves, without its optimizer files."""
    story = Story(pools, Cell(cell.precision, 2, cell.world), folder).train_and_save()
    remove_optimizer_files(folder)
    return story.saved


def from_rank_0(pools, cell, tmp_path, folder):
    """A converter that names its file as ZeRO-3's rank 0 does."""
    story = Story(pools, cell, tmp_path / "trained").train_and_save()
    write_model(folder, {"module": state_dict(story.saved[0])}, "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return story.saved


def from_16bit_model(pools, cell, tmp_path, folder):
    """What save_16bit_model() gathers, as the module of a model file."""
    story = Story(pools, cell, tmp_path / "trained")
    saved = story.ranks.run("resume.deepspeed.fresh:save_16bit_model", cell=cell, folder=str(tmp_path / "gathered"))
    gathered = torch.load(tmp_path / "gathered" / "pytorch_model.bin", weights_only=True)
    write_model(folder, {"module": gathered})
    return saved


SOURCES = {"stage2": from_stage_2, "rank0": from_rank_0, "16bit": from_16bit_model}


@pytest.mark.fault("fresh-optimizer-no-files",
                   symptom=(crash("AssertionError"), crash("FileNotFoundError"), symptoms.PeersHung))
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("cell", [pytest.param(c, id=c.id) for c in cells(stages=(3,))])
def test_zero3_loads_full_weights(pools, tmp_path, cell, source):
    folder = tmp_path / "weights"
    saved = SOURCES[source](pools, cell, tmp_path, folder)
    start(pools, cell, folder, BOTH, [saved[0]] * cell.world)


@pytest.mark.fault("fresh-optimizer-no-files", symptom=crash("FileNotFoundError", "can't find *_optim_states.pt"))
@pytest.mark.parametrize("load", [pytest.param(load, id=name) for name, load in LOADS.items()])
@pytest.mark.parametrize("world", (1, 2))
def test_zero3_without_its_weights_says_what_is_missing(pools, tmp_path, world, load):
    story = Story(pools, Cell("bf16", 3, world), tmp_path).train_and_save()
    remove_optimizer_files(tmp_path)
    outcomes = story.ranks.outcomes("resume.deepspeed.runs:resume", cell=story.cell, folder=story.folder, load=load)
    for outcome in outcomes:
        assert isinstance(outcome, symptoms.Symptom), f"loaded weights that are nowhere: {outcome}"
        if not (isinstance(outcome, symptoms.Crash) and outcome.type_name == "FileNotFoundError"
                and re.search(r"bf16_zero_pp_rank_\d+_mp_rank_00_optim_states\.pt", outcome.text)
                and "mp_rank_00_model_states.pt" in outcome.text):
            raise outcome


@pytest.mark.guard
@pytest.mark.parametrize("cell", [pytest.param(c, id=c.id) for c in cells(("fp32",), (0,))])
def test_stage_0_fp32_needs_no_optimizer_files(pools, tmp_path, cell):
    story = Story(pools, cell, tmp_path).train_and_save()
    story.check_weights_only(story.resume(NOOPT), counters=True)
