"""PipelineModule: bf16 without ZeRO trains with BF16_Optimizer, which saves its states as ZeRO does."""

from __future__ import annotations

import pytest

from resume import oracle, symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import ANY_LOAD, BOTH, MODULE_ONLY, NOOPT, RELEASE
from resume.symptoms import crash

# 0.17 trains these with a wrapper of fp16 in place of BF16_Optimizer, and loads nothing
OLD = RELEASE == (0, 17)
FAULT = "bf16-accum-any-load" if OLD else "pipeline-bf16-stage0"
# (ranks, pipeline stages): one of each, data parallel, pipeline parallel
SHAPES = [pytest.param(world, stages, id=f"{world}r-{stages}stages") for world, stages in ((1, 1), (2, 1), (2, 2))]


class Pipeline:
    """As ``Story``, for pipelines."""

    def __init__(self, pools, cell: Cell, folder, stages: int):
        self.ranks, self.common = pools(cell.world), {"cell": cell, "folder": str(folder), "stages": stages}
        self.trained = self.ranks.run("resume.deepspeed.pipeline:train_and_save", **self.common)
        self.saved = [r["saved"] for r in self.trained]

    def resume(self, load: dict) -> list[dict]:
        return self.ranks.run("resume.deepspeed.pipeline:resume", **self.common, load=load)

    def check_full(self) -> None:
        resumed = self.resume({})
        oracle.check(self.saved, [r["loaded"] for r in resumed], what="after the load")
        same = {"weights", "masters", "partitions", "moments", "step", "groups", "scale"}
        oracle.check([r["final"] for r in self.trained], [r["final"] for r in resumed], only=same, what="training on")


@pytest.mark.fault(FAULT, symptom=ANY_LOAD if OLD else crash("KeyError"))
@pytest.mark.parametrize("world, stages", SHAPES)
def test_full_resume_is_exact(pools, tmp_path, world, stages):
    Pipeline(pools, Cell("bf16", 0, world), tmp_path, stages).check_full()


@pytest.mark.fault(FAULT, symptom=ANY_LOAD if OLD else symptoms.MastersStale)
@pytest.mark.parametrize("world, stages", SHAPES)
def test_masters_follow_loaded_weights(pools, tmp_path, world, stages):
    pipeline = Pipeline(pools, Cell("bf16", 0, world), tmp_path, stages)
    check_weights(pipeline, NOOPT)


@pytest.mark.guard
@pytest.mark.parametrize("load", (MODULE_ONLY, BOTH), ids=("module-only", "both"))
def test_module_only(pools, tmp_path, load):
    check_weights(Pipeline(pools, Cell("bf16", 0, 2), tmp_path, stages=1), load)


def check_weights(pipeline: Pipeline, load: dict) -> None:
    loaded = [r["loaded"] for r in pipeline.resume(load)]
    oracle.check(pipeline.saved, loaded, only={"weights"}, what="after the load")
    oracle.check_masters_follow_weights(loaded, "after the load")


@pytest.mark.guard
@pytest.mark.parametrize("world, stages", SHAPES)
@pytest.mark.parametrize("precision, stage", (("bf16", 1), ("fp16", 0), ("fp32", 0)))
def test_full_resume_of_others_is_exact(pools, tmp_path, precision, stage, world, stages):
    Pipeline(pools, Cell(precision, stage, world), tmp_path, stages).check_full()
