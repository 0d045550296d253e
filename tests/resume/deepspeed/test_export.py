"""Exports hold every parameter and buffer of the model, the trained ones as fp32 masters, whoever had them.

Each export is compared with the run at the save, and loaded into a plain torch model with ``strict=True``.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from resume import oracle, symptoms
from resume.deepspeed import exports, runs
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import OWN_FILES, RELEASE, Story, variant
from resume.symptoms import crash

HOWS = ("lazy", "files", "script", "model")
# before 0.19 an export reads the optimizer files first, and fails at them where it finds others than expected
OPTIMIZER_FILES_FIRST = RELEASE < (0, 19)


def each(*cells: Cell) -> list:
    return [pytest.param(cell, id=cell.id) for cell in cells]


def save(pools, cell: Cell, folder, **kwargs) -> list[oracle.Snapshot]:
    if cell.model.startswith("pipe"):
        return pools(cell.world).run("resume.deepspeed.pipes:train_and_save", cell=cell, folder=str(folder), **kwargs)
    return Story(pools, cell, folder).train_and_save(**kwargs).saved


def check(pools, cell: Cell, folder, saved, how: str = "state dict", frozen: bool = True, **kwargs) -> None:
    run = pools(cell.world).run("resume.deepspeed.exports:export", cell=cell, folder=str(folder), how=how, **kwargs)
    expected = exports.expected(cell, saved, frozen=frozen)
    oracle.check([expected] * cell.world, run, only={"weights", "buffers"}, what="the export")


# --- what was right ---


@pytest.mark.guard
@pytest.mark.parametrize(
    "cell",
    each(
        Cell("fp16", 1, 2),
        Cell("bf16", 1, 2, "tied"),
        Cell("bf16", 2, 2, "frozen"),
        Cell("fp32", 3, 2, "frozen"),
        Cell("bf16", 3, 2, "lora"),
        Cell("fp16", 3, 1, "tied"),
    ),
)
def test_export(pools, tmp_path, cell):
    check(pools, cell, tmp_path, save(pools, cell, tmp_path))


@pytest.mark.guard
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("cell", each(Cell("bf16", 2, 2, "frozen"), Cell("bf16", 3, 2, "frozen")))
def test_every_way_to_export(pools, tmp_path, cell, how):
    check(pools, cell, tmp_path, save(pools, cell, tmp_path), how)


@pytest.mark.guard
@pytest.mark.parametrize("at_save", (False, True), ids=("export", "save"))
@pytest.mark.parametrize(
    "cell", each(Cell("bf16", 1, 2, "lora"), Cell("bf16", 2, 2, "lora"), Cell("bf16", 3, 2, "lora"))
)
def test_frozen_parameters_are_excluded(pools, tmp_path, cell, at_save):
    saved = save(pools, cell, tmp_path, save={"exclude_frozen_parameters": at_save})
    check(pools, cell, tmp_path, saved, frozen=False, exclude_frozen_parameters=True)
    if at_save:
        exported = pools(cell.world).run(
            "resume.deepspeed.exports:export", cell=cell, folder=str(tmp_path), exclude_frozen_parameters=False
        )
        oracle.check([exports.expected(cell, saved, frozen=False)], exported[:1], only={"weights", "buffers"})


# --- frozen parameters at stage 1 ---


@pytest.mark.fault("stage1-frozen-export", symptom=symptoms.WeightsNotRestored)
@pytest.mark.parametrize(
    "cell",
    each(
        Cell("bf16", 1, 1, "frozen"),
        Cell("fp16", 1, 2, "frozen"),
        Cell("fp32", 1, 2, "frozen"),
        Cell("bf16", 1, 2, "lora"),
        Cell("fp16", 1, 1, "lora"),
    ),
)
def test_stage1_export_has_frozen_parameters(pools, tmp_path, cell):
    check(pools, cell, tmp_path, save(pools, cell, tmp_path))


@pytest.mark.fault("stage1-frozen-export", symptom=symptoms.WeightsNotRestored)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("cell", each(Cell("bf16", 1, 2, "frozen")))
def test_every_way_to_export_stage1_has_frozen_parameters(pools, tmp_path, cell, how):
    check(pools, cell, tmp_path, save(pools, cell, tmp_path), how)


# --- BF16_Optimizer ---


# 0.17 has a wrapper of fp16 in its place, which saves no shards: it has the export too once that is mended
NO_SHARDS = (
    crash("FileNotFoundError", "optim_states.pt")
    if RELEASE == (0, 17)
    else crash("ValueError", "is not a zero checkpoint")
)


@pytest.mark.fault("bf16opt-export", symptom=NO_SHARDS)
@pytest.mark.parametrize("how", ("state dict", "files"))
@pytest.mark.parametrize(
    "cell",
    each(*(Cell("bf16", 1, w, model, grad_accum="fp32") for w in (1, 2) for model in ("dense", "frozen", "tied"))),
)
def test_bf16_optimizer_exports(pools, tmp_path, cell, how):
    check(pools, cell, tmp_path, save(pools, cell, tmp_path), how)


# --- mixture of experts ---

NO_EXPERTS = (
    crash("KeyError", "optimizer_state_dict")
    if OPTIMIZER_FILES_FIRST
    else crash("ValueError", "is not a model state checkpoint")
)
MOE = (
    Cell("bf16", 1, 1, "moe"),
    Cell("bf16", 1, 2, "moe"),
    Cell("bf16", 2, 2, "moe"),
    Cell("fp16", 2, 2, "moe"),
    Cell("fp32", 1, 2, "moe"),
    Cell("bf16", 1, 2, "moe", grad_accum="fp32"),
    Cell("bf16", 1, 2, "frozen-moe"),
    Cell("fp16", 2, 1, "frozen-moe"),
    Cell("bf16", 2, 2, "frozen-moe"),
)


@pytest.mark.fault("moe-export", symptom=NO_EXPERTS)
@pytest.mark.parametrize("cell", each(*MOE))
def test_experts_export(pools, tmp_path, cell):
    check(pools, cell, tmp_path, save(pools, cell, tmp_path))


@pytest.mark.fault("moe-export", symptom=NO_EXPERTS)
@pytest.mark.parametrize("cell", each(Cell("bf16", 2, 2, "moe")))
def test_experts_export_to_files(pools, tmp_path, cell):
    check(pools, cell, tmp_path, save(pools, cell, tmp_path), "files")


@pytest.mark.fault("moe-export", symptom=NO_EXPERTS)
@pytest.mark.parametrize("cell", each(Cell("bf16", 2, 2, "moe")))
def test_an_expert_that_is_missing_is_named(pools, tmp_path, cell):
    saved = save(pools, cell, tmp_path)
    name = "layer_0_expert_1_mp_rank_00_model_states.pt"
    os.remove(next(tmp_path.glob(f"*/{name}")))
    with pytest.raises(symptoms.Crash) as caught:
        check(pools, cell, tmp_path, saved)
    if not crash("FileNotFoundError", name).matches(caught.value):
        raise caught.value


@pytest.mark.fault("moe-16bit-model", symptom=symptoms.WeightsNotRestored)
@pytest.mark.parametrize(
    "cell",
    each(
        Cell("bf16", 0, 2, "moe"),
        Cell("bf16", 1, 2, "moe"),
        Cell("fp16", 2, 2, "moe"),
        Cell("bf16", 2, 2, "frozen-moe"),
    ),
)
def test_16bit_model_has_all_experts(pools, tmp_path, cell):
    saved = pools(cell.world).run("resume.deepspeed.fresh:save_16bit_model", cell=cell, folder=str(tmp_path))
    found = pools(cell.world).run("resume.deepspeed.exports:read_16bit_model", cell=cell, folder=str(tmp_path))
    oracle.check([exports.expected(cell, saved, masters=False)], found[:1], only={"weights", "buffers"})


@pytest.mark.guard
@pytest.mark.parametrize(
    "cell",
    each(
        Cell("bf16", 1, 1, "moe"), Cell("bf16", 2, 2, "frozen"), Cell("fp16", 3, 2, "tied"), Cell("bf16", 3, 2, "lora")
    ),
)
def test_16bit_model(pools, tmp_path, cell):
    test_16bit_model_has_all_experts(pools, tmp_path, cell)


# --- pipelines ---


def pipelines(*cells: Cell) -> list:
    fault = pytest.mark.fault
    return [pytest.param(c, id=c.id, marks=fault("pipeline-export", symptom=no_pipelines(c))) for c in cells]


def no_pipelines(cell: Cell) -> crash:
    """How the export of a pipeline fails: one rank is one stage."""
    if cell.world == 1 or not OPTIMIZER_FILES_FIRST:
        return crash("AttributeError", "'NoneType' object has no attribute 'items'")
    return crash("ValueError", "is not a zero checkpoint" if cell.grad_accum else "of '*_optim_states.pt' under")


@pytest.mark.parametrize(
    "cell",
    pipelines(
        *(Cell(precision, 1, world, "pipe") for precision in ("bf16", "fp16", "fp32") for world in (1, 2)),
        Cell("bf16", 1, 2, "pipe", grad_accum="fp32"),
        *(Cell("bf16", 1, world, kind) for kind in ("pipe-tied", "pipe-frozen") for world in (1, 2)),
    ),
)
def test_pipeline_exports(pools, tmp_path, cell):
    check(pools, cell, tmp_path, save(pools, cell, tmp_path))


@pytest.mark.parametrize("how", ("files", "model"))
@pytest.mark.parametrize("cell", pipelines(Cell("bf16", 1, 2, "pipe-tied")))
def test_every_way_to_export_a_pipeline(pools, tmp_path, cell, how):
    check(pools, cell, tmp_path, save(pools, cell, tmp_path), how)


# --- a model with other names ---


@pytest.mark.fault("export-load-names", symptom=symptoms.WeightsNotRestored)
@pytest.mark.parametrize("cell", each(Cell("bf16", 2, 1), Cell("fp16", 3, 2)))
def test_a_model_without_any_of_the_names_is_refused(pools, tmp_path, cell):
    saved = save(pools, cell, tmp_path)
    wrapped = variant(cell, model="based")
    try:
        check(pools, wrapped, tmp_path, saved, "model")
    except symptoms.Crash as error:
        if not crash("ValueError", "None of the names in the checkpoint").matches(error):
            raise


@pytest.mark.guard
@pytest.mark.parametrize("cell", each(Cell("bf16", 2, 2, "lora")))
def test_a_model_may_have_more_names(pools, tmp_path, cell):
    saved = save(pools, variant(cell, model="based"), tmp_path)
    exported = pools(cell.world).run("resume.deepspeed.exports:export", cell=cell, folder=str(tmp_path), how="model")
    expected = exports.expected(cell, saved)
    weights = {name: exported[0].weights[name] for name in expected.weights}
    oracle.check([expected], [replace(exported[0], weights=weights)], only={"weights", "buffers"})


# --- the tag, debug output, and checkpoints without ZeRO ---


@pytest.mark.fault("export-tag", symptom=crash("TypeError"))
@pytest.mark.parametrize("how", ("state dict", "files", "model"))
@pytest.mark.parametrize("cell", each(Cell("bf16", 2, 1), Cell("bf16", 3, 2)))
def test_tag_may_be_an_integer(pools, tmp_path, cell, how):
    saved = save(pools, cell, tmp_path, tag=3)
    save(pools, cell, tmp_path, tag=6, seed=7)
    check(pools, cell, tmp_path, saved, how, tag=3)


@pytest.mark.fault("export-debug", symptom=crash("AttributeError", "shape"))
@pytest.mark.parametrize("cell", each(Cell("bf16", 3, 2, "frozen"), Cell("fp32", 3, 1)))
def test_debug_output(pools, tmp_path, cell):
    check(pools, cell, tmp_path, save(pools, cell, tmp_path), "debug")


@pytest.mark.guard
@pytest.mark.parametrize("cell", each(Cell("bf16", 2, 2, "frozen")))
def test_debug_output_of_stage2(pools, tmp_path, cell):
    test_debug_output(pools, tmp_path, cell)


NO_ZERO = crash("FileNotFoundError", "optim_states.pt") if OPTIMIZER_FILES_FIRST else crash("TypeError", "NoneType")
NO_ZERO_CELLS = [Cell("fp32", 0, 1), Cell("fp16", 0, 2), *(() if OWN_FILES else (Cell("bf16", 0, 1),))]


@pytest.mark.fault("stage0-export", symptom=NO_ZERO)
@pytest.mark.parametrize("cell", each(*NO_ZERO_CELLS))
def test_stage0_export_says_where_the_weights_are(pools, tmp_path, cell):
    saved = save(pools, cell, tmp_path)
    with pytest.raises(symptoms.Crash) as caught:
        check(pools, cell, tmp_path, saved)
    if not crash("ValueError", f"global_step{runs.STEPS}/mp_rank_00_model_states.pt").matches(caught.value):
        raise caught.value


# --- a file that is cut short ---


@pytest.mark.fault("export-unreadable-file", symptom=(crash("OSError"), crash("RuntimeError"), crash("EOFError")))
@pytest.mark.parametrize("pattern", ("*optim_states.pt", "*model_states.pt"))
@pytest.mark.parametrize("cell", each(Cell("bf16", 1), Cell("bf16", 2, 2), Cell("bf16", 3, 2)))
def test_a_file_that_cannot_be_read_is_named(pools, tmp_path, cell, pattern):
    saved = save(pools, cell, tmp_path)
    file = sorted(tmp_path.glob(f"*/{pattern}"))[-1]
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(symptoms.Crash) as caught:
        check(pools, cell, tmp_path, saved)
    if not crash("RuntimeError", f"Cannot read '{file}'. Restore it").matches(caught.value):
        raise caught.value
