"""A fresh optimizer on loaded weights: optimizer files are left alone, or absent as after a conversion."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import replace

import pytest
import torch

from resume import oracle, symptoms
from resume.deepspeed import models
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import BOTH, FRESH, NOOPT, Story, cells
from resume.symptoms import crash

LOADS = {"noopt": NOOPT, "both": BOTH}
TAG = "converted"


def params(cells_and_loads) -> list:
    """One pytest parameter for each (cell, name of a load)."""
    return [pytest.param(cell, LOADS[load], id=f"{cell.id}-{load}") for cell, load in cells_and_loads]


def write_model(folder, content: dict, name: str = "mp_rank_00_model_states.pt") -> None:
    """A checkpoint folder as a converter leaves it: ``latest`` and one model file, no optimizer files."""
    os.makedirs(os.path.join(folder, TAG))
    torch.save(content, os.path.join(folder, TAG, name))
    with open(os.path.join(folder, "latest"), "w") as file:
        file.write(TAG)


def remove_optimizer_files(folder) -> None:
    """Delete every optimizer file below ``folder``; there must be some."""
    files = glob.glob(os.path.join(folder, "*", "*optim_states.pt"))
    assert files, f"no optimizer files in {folder}"
    for file in files:
        os.remove(file)


def start(pools, cell: Cell, folder, load: dict, saved: list[oracle.Snapshot]) -> list[dict]:
    """Load ``folder`` into a new engine of ``cell`` and hold it against ``saved`` and a new run from it."""
    story = Story(pools, cell, folder)
    resumed = story.resume(load)
    for result in resumed:
        result["loaded"] = oracle.without(result["loaded"], "client")
    # releases differ in whether 16-bit training has 16-bit buffers
    saved = [
        replace(
            oracle.without(one, "client"),
            buffers={n: b.to(result["loaded"].buffers[n].dtype) for n, b in one.buffers.items()},
        )
        for one, result in zip(saved, resumed, strict=True)
    ]
    story.check_weights_only(resumed, counters=False, saved=saved)
    story.check_no_optimizer_file(resumed)
    return resumed


# --- the optimizer files are there, and are to be left alone ---

# pristine 0.12.6 refreshes the masters in one case: fp16 with load_module_only
RIGHT = [(c, "both") for c in cells(("fp16",), (1, 2, 3), (1,))]
WRONG = [(c, "noopt") for c in cells(stages=(1, 2, 3))]
WRONG += [(c, "both") for c in cells(("bf16", "fp32"), (1, 2, 3), (1,))]
WRONG += [(Cell("bf16", 1, w, grad_accum="fp32"), load) for w, load in ((1, "noopt"), (1, "both"), (2, "noopt"))]
WRONG += [(Cell("bf16", 2, load_from_fp32=False), "noopt"), (Cell("bf16", 3, optimizer="fused"), "noopt")]


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
@pytest.mark.parametrize(
    "cell, load",
    params(
        [(c, "noopt") for c in cells(("bf16", "fp32"), (1, 2), model="moe")]
        + [(Cell("bf16", 2, 1, model="moe"), "both")]
    ),
)
def test_masters_follow_loaded_weights_of_experts(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path).train_and_save()
    resumed = story.resume(load)
    check_experts(story, resumed)


def check_experts(story: Story, resumed: list[dict]) -> None:
    """As ``Story.check_weights_only``, by partitions: <= 0.12 cannot name the masters of experts."""
    loaded = [r["loaded"] for r in resumed]
    oracle.check(story.saved, loaded, only={"weights"}, what="after the load")
    reference = story.ranks.run(
        "resume.deepspeed.fresh:reference", cell=story.cell, weights=[s.weights for s in story.saved]
    )
    fresh = [r["fresh"] for r in reference]
    oracle.check(
        fresh,
        loaded,
        only={"partitions", "moments", "step", "groups", "scale"},
        as_symptom=FRESH,
        what="after the load",
    )
    oracle.check(
        [r["final"] for r in reference],
        [r["final"] for r in resumed],
        only={"weights", "moments"},
        as_symptom=dict.fromkeys(("weights", "moments"), symptoms.Diverged),
        what="training on",
    )
    story.check_no_optimizer_file(resumed)


# --- there are no optimizer files ---

# what becomes of a model file: without DeepSpeed's bookkeeping at stages 0-2; not named by ZeRO-3, as which it is
# looked for (the assertion has no text); with weights that ZeRO-3 looks for in the optimizer files all the same
NO_PROGRESS = crash("KeyError", "dp_world_size")
NOT_FOUND = crash("AssertionError")
NO_SHARDS = crash("FileNotFoundError", "can't find *_optim_states.pt")
NO_ZERO3_FILE = crash("ValueError", "not a model state checkpoint")


def no_files(symptom):
    """The mark of a test of ``fresh-optimizer-no-files``."""
    return pytest.mark.fault("fresh-optimizer-no-files", symptom=symptom)


def converted(cell: Cell) -> tuple[dict, list[oracle.Snapshot]]:
    """A model made without DeepSpeed: its fp32 state dict, and what each rank must have after the load."""
    model = models.make("dense", seed=11)
    for buffer in model.buffers():
        buffer.fill_(0.25)
    expected = oracle.Snapshot(
        weights={n: p.detach().to(cell.dtype) for n, p in model.named_parameters()}, buffers=dict(model.named_buffers())
    )
    return model.state_dict(), [expected] * cell.world


def check_converted(pools, cell: Cell, folder, load: dict, expected: list[oracle.Snapshot]) -> None:
    """``folder`` loads, and training goes on from its weights with a fresh optimizer."""
    resumed = start(pools, cell, folder, load, expected)
    fresh, loaded, final = ([r[when] for r in resumed] for when in ("fresh", "loaded", "final"))
    assert oracle.moved(loaded, final) > 1e-4, "it did not train"  # a warm-up moves little
    oracle.check(fresh, loaded, only={"scheduler"})


CONVERTED = [(c, "both") for c in cells()] + [(c, "noopt") for c in cells(("bf16",), worlds=(1,), scheduler=True)]


@pytest.mark.parametrize(
    "cell, load",
    [
        pytest.param(*p.values, id=p.id, marks=no_files(NOT_FOUND if p.values[0].stage == 3 else NO_PROGRESS))
        for p in params(CONVERTED)
    ],
)
def test_converted_model_starts_training(pools, tmp_path, cell, load):
    weights, expected = converted(cell)
    write_model(tmp_path, {"module": weights})
    check_converted(pools, cell, tmp_path, load, expected)


@no_files(NO_PROGRESS)
@pytest.mark.parametrize("load", [pytest.param(load, id=name) for name, load in LOADS.items()])
def test_client_state_is_what_the_file_holds(pools, tmp_path, load):
    cell = Cell("bf16", 1, scheduler=True)
    write_model(tmp_path, {"module": converted(cell)[0], "epoch": 3})
    client_states = pools(cell.world).run(
        "resume.deepspeed.fresh:client_state", cell=cell, folder=str(tmp_path), load=load
    )
    assert client_states == [{"epoch": 3}] * cell.world


def from_stage_2(pools, cell, tmp_path, folder):
    """The model file that ZeRO-2 saves, without its optimizer files."""
    story = Story(pools, Cell(cell.precision, 2, cell.world), folder).train_and_save()
    remove_optimizer_files(folder)
    return story.saved


def from_rank_0(pools, cell, tmp_path, folder):
    """A converter that names its file as ZeRO-3's rank 0 does."""
    weights, expected = converted(cell)
    write_model(folder, {"module": weights}, "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return expected


def from_16bit_model(pools, cell, tmp_path, folder):
    """What save_16bit_model() gathers, as the module of a model file."""
    gathered = str(tmp_path / "gathered")
    saved = pools(cell.world).run("resume.deepspeed.fresh:save_16bit_model", cell=cell, folder=gathered)
    weights = torch.load(os.path.join(gathered, "pytorch_model.bin"), weights_only=True)
    write_model(folder, {"module": weights})
    return saved


# how a rank fails depends on the release: newer ones read the model files before they look for the optimizer files
SOURCES = [
    pytest.param(from_stage_2, id="stage2", marks=no_files(NOT_FOUND)),
    pytest.param(from_rank_0, id="rank0", marks=no_files((NO_ZERO3_FILE, NO_SHARDS))),
    pytest.param(from_16bit_model, id="16bit", marks=no_files(NOT_FOUND)),
]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("cell", [pytest.param(c, id=c.id) for c in cells(("bf16",), (3,))])
def test_zero3_loads_full_weights(pools, tmp_path, cell, source):
    folder = tmp_path / "weights"
    saved = source(pools, cell, tmp_path, folder)
    start(pools, cell, folder, BOTH, [saved[0]] * cell.world)


@pytest.mark.fault("fresh-optimizer-no-files", symptom=NO_SHARDS)
@pytest.mark.parametrize("cell, load", params((Cell("bf16", 3, w), load) for w in (1, 2) for load in LOADS))
def test_zero3_without_its_weights_says_what_is_missing(pools, tmp_path, cell, load):
    story = Story(pools, cell, tmp_path).train_and_save()
    remove_optimizer_files(tmp_path)
    outcomes = story.ranks.outcomes("resume.deepspeed.runs:resume", cell=cell, folder=story.folder, load=load)
    for outcome in outcomes:
        assert isinstance(outcome, symptoms.Symptom), f"loaded weights that are nowhere: {outcome}"
        if not (
            isinstance(outcome, symptoms.Crash)
            and outcome.type_name == "FileNotFoundError"
            and re.search(r"bf16_zero_pp_rank_\d+_mp_rank_00_optim_states\.pt", outcome.text)
            and "mp_rank_00_model_states.pt" in outcome.text
        ):
            raise outcome
