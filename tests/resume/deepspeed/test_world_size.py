"""A checkpoint of ZeRO 1-3 resumes at another world size.

Protocol
1. a run of ``saved`` ranks trains and saves; its state is taken by parameter name, whatever the partitioning;
2. a freshly seeded engine of ``loaded`` ranks loads: that state is the save's, bit for bit, on every rank;
3. its further steps are those of a new run at ``loaded`` ranks that was given the state by hand.
"""

from __future__ import annotations

import re

import pytest

from resume import oracle, symptoms
from resume.deepspeed.engines import Cell
from resume.deepspeed.story import OWN_FILES, RELEASE, Story, variant
from resume.deepspeed.world_size import Case
from resume.symptoms import crash

REFUSED = crash("ZeRORuntimeException", "DP world size")
SUB_GROUPS = (("sub_group_size", 40),)  # 1 to 3 parameters each, and not the same at every world size

CASES = [
    Case(1, 2, Cell("bf16", 1)),
    Case(2, 1, Cell("fp16", 1, scheduler=True)),
    Case(2, 1, Cell("bf16", 1, grad_accum="fp32")),
    Case(1, 3, Cell("bf16", 1, grad_accum="fp32"), frozen=True),
    Case(2, 1, Cell("bf16", 2), zero=(("round_robin_gradients", True),)),
    Case(2, 3, Cell("fp32", 2), frozen=True),
    Case(1, 2, Cell("fp16", 3), frozen=True),
    Case(2, 1, Cell("bf16", 3), frozen=True, zero=SUB_GROUPS),
    Case(3, 2, Cell("fp32", 3), zero=SUB_GROUPS),
]
CASES += [Case(1, 2, Cell("bf16", 0))] if OWN_FILES else []
if RELEASE == (0, 17):  # it cannot train stages 1 and 2 on 3 ranks
    CASES = [case for case in CASES if case.cell.stage == 3 or 3 not in (case.saved, case.loaded)]


def of(function: str) -> str:
    return f"resume.deepspeed.world_size:{function}"


def fault(symptom=REFUSED):
    return pytest.mark.fault("world-size-change", symptom=symptom)


def symptom(case: Case):
    """Under ZeRO-3 frozen parameters are copied, in fragments of the old size, before the world size is looked at."""
    return crash("RuntimeError", "size of tensor") if case.frozen and case.cell.stage == 3 else REFUSED


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id, marks=fault(symptom(case))) for case in CASES])
def test_resume_at_another_world_size(pools, tmp_path, case):
    saved = pools(case.saved).run(of("train_and_save"), case=case, folder=str(tmp_path))[0]
    resumed = pools(case.loaded).run(of("resume"), case=case, folder=str(tmp_path))
    oracle.check([saved] * case.loaded, [r["loaded"] for r in resumed], what="after the load")
    reference = pools(case.loaded).run(of("reference"), case=case, saved=saved)
    finals = [r["final"] for r in resumed]
    if oracle.moved([saved] * case.loaded, finals) < 1e-3:
        raise AssertionError("training on does not move the weights: it cannot show anything")
    oracle.check(reference, finals, what="training on", as_symptom=dict.fromkeys(oracle.KINDS, symptoms.Diverged))


def optimizer_files(opened: list[str]) -> list[int]:
    """The ranks whose optimizer files are among ``opened``."""
    return sorted(int(re.search(r"pp_rank_(\d+)_", name)[1]) for name in opened if "optim_states" in name)


@fault()
@pytest.mark.parametrize("stage", (3,) if RELEASE == (0, 17) else (1, 3))  # as for CASES
def test_only_the_shards_that_are_needed_are_read(pools, tmp_path, stage):
    case = Case(3, 2, Cell("bf16", stage))
    pools(3).run(of("train_and_save"), case=case, folder=str(tmp_path))
    resumed = pools(2).run(of("resume"), case=case, folder=str(tmp_path))
    assert [optimizer_files(r["opened"]) for r in resumed] == [[0, 1], [1, 2]]


@pytest.mark.guard
@pytest.mark.parametrize("stage", (1, 3))
def test_the_same_world_size_reads_its_own_files_only(pools, tmp_path, stage):
    case = Case(2, 2, Cell("bf16", stage), frozen=stage == 3)
    saved = pools(2).run(of("train_and_save"), case=case, folder=str(tmp_path))[0]
    resumed = pools(2).run(of("resume"), case=case, folder=str(tmp_path))
    oracle.check([saved] * 2, [r["loaded"] for r in resumed])
    assert [optimizer_files(r["opened"]) for r in resumed] == [[0], [1]]
    models = ["mp_rank_00_model_states.pt"] * 2
    if stage == 3:
        models = [f"zero_pp_rank_{rank}_{name}" for rank, name in enumerate(models)]
    assert [[n for n in r["opened"] if "model_states" in n] for r in resumed] == [[name] for name in models]


def check_refused(refused: list[dict], type_name: str, *texts: str) -> None:
    """Every rank raised ``type_name`` with all ``texts`` in its message, and had changed nothing."""
    for result in refused:
        error = result["error"]
        if error is None:
            raise symptoms.NothingLoaded("a load that cannot work was not refused")
        if error.type_name != type_name or any(text not in error.text for text in texts):
            raise error
    oracle.check([r["before"] for r in refused], [r["after"] for r in refused], what="after the refusal")


@fault()
def test_refuses_experts(pools, tmp_path):
    cell = Cell("bf16", 2, 2, model="moe")
    Story(pools, cell, tmp_path).train_and_save()
    refused = pools(1).run(of("refused"), cell=variant(cell, world=1), folder=str(tmp_path))
    check_refused(refused, "ZeRORuntimeException", "world size of 2", "world size is 1", "experts")


@fault(crash("KeyError", "up.weight"))
@pytest.mark.parametrize("stage", (2, 3))
def test_refuses_another_choice_of_frozen_parameters(pools, tmp_path, stage):
    cell = Cell("bf16", stage, 1)
    Story(pools, cell, tmp_path).train_and_save()
    refused = pools(2).run(of("refused"), cell=variant(cell, world=2, model="frozen"), folder=str(tmp_path))
    check_refused(refused, "ZeRORuntimeException", "world size of 1", "only the checkpoint", "'up.bias'")


@fault()
def test_names_a_shard_that_is_missing(pools, tmp_path):
    cell = Cell("bf16", 3, 2)
    Story(pools, cell, tmp_path).train_and_save()
    (file,) = tmp_path.glob("*/*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    file.unlink()
    refused = pools(1).run(of("refused"), cell=variant(cell, world=1), folder=str(tmp_path))
    check_refused(refused, "FileNotFoundError", "world size of 2", str(file))
