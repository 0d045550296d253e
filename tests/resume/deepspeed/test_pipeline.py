"""PipelineModule: bf16 without ZeRO trains with BF16_Optimizer, which saves its states as ZeRO does."""

from __future__ import annotations

import pytest

from resume import oracle, symptoms
from resume.deepspeed.engines import NODE_LOCAL, Cell
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

    def resume(self, load: dict, cell: Cell | None = None, ranks=None) -> list[dict]:
        common = {**self.common, "cell": cell or self.common["cell"]}
        return (ranks or self.ranks).run("resume.deepspeed.pipeline:resume", **common, load=load)

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


# --- what the other tests of these faults have no pipeline for ---


@pytest.mark.fault("other-precision-weights", symptom=symptoms.MastersStale)
@pytest.mark.parametrize("world, stages", SHAPES)
def test_weights_of_another_precision_are_the_masters(pools, tmp_path, world, stages):
    pipeline = Pipeline(pools, Cell("fp16", 1, world), tmp_path, stages)
    loaded = [r["loaded"] for r in pipeline.resume({}, Cell("fp32", 1, world))]
    oracle.check(pipeline.saved, loaded, only={"masters"}, what="after the load")
    oracle.check_masters_follow_weights(loaded, "after the load")


OTHER_WORLD = (crash("ZeRORuntimeException", "DP world size"), crash("KeyError"), ANY_LOAD)


@pytest.mark.fault("world-size-change", symptom=OTHER_WORLD)
@pytest.mark.parametrize("stage", (0, 1))
@pytest.mark.parametrize("saved, now", ((1, 2), (2, 1)), ids=("1to2", "2to1"))
def test_resume_at_another_world_size(pools, tmp_path, saved, now, stage):
    pipeline = Pipeline(pools, Cell("bf16", stage, saved), tmp_path, 1)
    loaded = [r["loaded"] for r in pipeline.resume({}, Cell("bf16", stage, now), pools(now))]
    oracle.check([pipeline.saved[0]] * now, loaded, only={"weights", "masters", "groups", "counters"})


@pytest.mark.fault("node-local-model-files", symptom=crash("AssertionError"))
@pytest.mark.parametrize("precision, stage", (("bf16", 1), ("fp16", 0)))
def test_node_local_storage_has_every_stage(pools, tmp_path, precision, stage):
    Pipeline(pools, Cell(precision, stage, 2, options=(NODE_LOCAL,)), tmp_path, 2).check_full()
