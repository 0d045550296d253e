"""Universal checkpoints: everything comes back, on as many ranks as it was saved on and on others."""

from __future__ import annotations

import pytest

from resume import oracle, symptoms
from resume.deepspeed.story import BOTH, MODULE_ONLY, NOOPT, RELEASE, variant
from resume.deepspeed.test_load_errors import check_outcomes
from resume.deepspeed.universal import CONVERTED, HELD, LINK_LOST, UniversalCell, UniversalStory
from resume.symptoms import crash

# before 0.18 the conversion fails for ZeRO-3 with several groups, which is a fault of its own
ONE_GROUP = RELEASE < (0, 18)
UNCONVERTED = crash("RuntimeError", "exceeds dimension size")


def bf16(stage: int, world: int = 1, **kwargs) -> UniversalCell:
    groups = 1 if ONE_GROUP and stage == 3 else 2
    return UniversalCell("bf16", stage, world, **{"model": "pair", "groups": groups, **kwargs})


def fp16(stage: int, world: int = 1, **kwargs) -> UniversalCell:
    return variant(bf16(stage, world, **kwargs), precision="fp16")


def fp32(stage: int, world: int = 1, **kwargs) -> UniversalCell:
    return variant(bf16(stage, world, **kwargs), precision="fp32")


def over_bf16(world: int = 1, **kwargs) -> UniversalCell:
    """BF16_Optimizer."""
    return bf16(1, world, grad_accum="fp32", **kwargs)


def of(*cells: UniversalCell, mark=None):
    """``mark``: gives the mark of each cell, where they differ."""
    return pytest.mark.parametrize(
        "cell", [pytest.param(cell, id=cell.id, marks=mark(cell) if mark else ()) for cell in cells]
    )


def fault(name: str, symptom):
    """The mark of a fault; 0.17 crashes in the conversion of BF16_Optimizer's checkpoints."""
    if RELEASE == (0, 17):
        known = symptom if isinstance(symptom, tuple) else (symptom,)
        symptom = (*known, crash("KeyError", "param_slice_mappings"))
    return pytest.mark.fault(name, symptom=symptom)


def right(cell: UniversalCell):
    """The mark of a full load that is right but for the link to the fp32 weights, which ZeRO-3 has not."""
    if LINK_LOST and cell.stage < 3:
        return fault("universal-fp32-link", symptom=symptoms.MastersStale)
    return pytest.mark.guard


def loads_whole(pools, tmp_path, cell: UniversalCell, **kwargs) -> None:
    story = UniversalStory(pools, cell, tmp_path).train_and_save(**kwargs)
    story.check_full(story.resume())


def loads_elsewhere(pools, tmp_path, cell: UniversalCell) -> None:
    """Saved on one rank and loaded on two, or the reverse."""
    story = UniversalStory(pools, cell, tmp_path).train_and_save(full=True)
    story.check_elsewhere(story.resume(cell=variant(cell, world=3 - cell.world), full=True))


# --- what the optimizer does not own ---


@fault("universal-buffers-frozen", symptom=symptoms.BuffersNotRestored)
@of(over_bf16(model="counted"), bf16(2, 2, model="counted"), fp32(1, model="counted"),
    fp16(3, model="counted"), bf16(3, 2, model="counted"))  # fmt: skip
def test_buffers_and_extra_state(pools, tmp_path, cell):
    loads_whole(pools, tmp_path, cell)


@fault("universal-buffers-frozen", symptom=symptoms.WeightsNotRestored)
@of(over_bf16(2, model="frozen"), fp16(2, model="frozen"), fp32(3, model="frozen"), bf16(3, 2, model="frozen"))
def test_frozen_parameters(pools, tmp_path, cell):
    loads_whole(pools, tmp_path, cell)


@fault("universal-buffers-frozen", symptom=symptoms.WeightsNotRestored)
@of(bf16(2, model="frozen"), bf16(3, model="frozen"), bf16(3, 2, model="frozen"))
def test_frozen_parameters_on_other_ranks(pools, tmp_path, cell):
    loads_elsewhere(pools, tmp_path, cell)


@fault("universal-buffers-frozen", symptom=symptoms.WeightsNotRestored)
def test_frozen_parameters_that_the_conversion_left_out(pools, tmp_path):
    story = UniversalStory(pools, bf16(3, model="frozen"), tmp_path).train_and_save()
    for path in tmp_path.glob(f"{CONVERTED}/zero/up.*/fp32.pt"):
        path.unlink()
    try:
        story.check_full(story.resume())
    except symptoms.Crash as error:
        if not crash("FileNotFoundError", "Convert the source again").matches(error):
            raise


# --- round robin ---

ROUND_ROBIN = {"options": ("round_robin_gradients",), "model": "dense"}  # of more than two parameters in a group


@fault("round-robin-links", symptom=symptoms.WeightsNotRestored)
@of(bf16(2, 2, **ROUND_ROBIN), fp32(1, 2, **ROUND_ROBIN))
def test_parameters_have_their_own_names_under_round_robin(pools, tmp_path, cell):
    loads_elsewhere(pools, tmp_path, cell)


# --- several nodes ---


@pytest.mark.fault("universal-zero3-nodes", symptom=symptoms.WeightsNotRestored)
@of(bf16(3, 2), fp32(3, 2))
def test_ranks_of_several_nodes(pools, tmp_path, cell):
    story = UniversalStory(pools, cell, tmp_path).train_and_save()
    story.check_full(story.resume(nodes=True))


# --- param groups ---

TWO = {"groups": 2}
GROUPS = (
    bf16(3, **TWO), bf16(3, 2, **TWO), fp16(3, **TWO), fp32(3, 2, **TWO), bf16(3, 2, groups=3),
    bf16(3, model="tied", **TWO), bf16(3, optimizer="fused", **TWO),
)  # fmt: skip
ZERO3_GROUPS = pytest.mark.fault(
    "universal-zero3-groups", symptom=UNCONVERTED if ONE_GROUP else symptoms.GroupsNotRestored
)


@ZERO3_GROUPS
@of(*GROUPS)
def test_each_param_group_has_its_own_hyperparameters(pools, tmp_path, cell):
    loads_whole(pools, tmp_path, cell)


@ZERO3_GROUPS
@of(bf16(3, groups=3), bf16(3, 2, model="odd", **TWO))
def test_each_param_group_on_other_ranks(pools, tmp_path, cell):
    loads_elsewhere(pools, tmp_path, cell)


@ZERO3_GROUPS
@of(bf16(3, 1, **TWO), bf16(3, 2, **TWO))
def test_another_number_of_param_groups_is_refused(pools, tmp_path, cell):
    refuses_other_groups(pools, tmp_path, cell, 3)


def refuses_other_groups(pools, tmp_path, cell: UniversalCell, groups: int) -> None:
    story = UniversalStory(pools, cell, tmp_path).train_and_save()
    try:
        story.resume(cell=variant(cell, groups=groups))
    except symptoms.Crash as error:
        if not crash("ValueError", f"has {cell.groups} param groups, but the optimizer has {groups}").matches(error):
            raise
    else:
        raise symptoms.GroupsNotRestored(f"{cell.groups} param groups were loaded into {groups}, and nothing said so")


@fault("universal-group-count", symptom=symptoms.GroupsNotRestored)
@pytest.mark.parametrize("groups", (1, 3))
@of(over_bf16(), bf16(2, 2), fp16(1), fp32(2))
def test_another_number_of_param_groups_is_refused_at_stages_1_and_2(pools, tmp_path, cell, groups):
    refuses_other_groups(pools, tmp_path, cell, groups)


@fault("universal-group-count", symptom=symptoms.WeightsNotRestored)
@of(over_bf16(), bf16(2, 2))
def test_weights_alone_need_no_param_groups(pools, tmp_path, cell):
    story = UniversalStory(pools, cell, tmp_path).train_and_save()
    loaded = [r["loaded"] for r in story.resume(NOOPT, cell=variant(cell, groups=3))]
    oracle.check(story.saved, loaded, only={"weights", "masters"}, what="after the load")


# --- step ---

SUB_GROUPS = {"groups": 1, "sub_group": 100}
STEP = ZERO3_GROUPS if ONE_GROUP else pytest.mark.fault("universal-zero3-step", symptom=symptoms.Diverged)


@STEP
@of(bf16(3, **SUB_GROUPS), bf16(3, 2, **SUB_GROUPS), fp16(3, **SUB_GROUPS), fp32(3, 2, **SUB_GROUPS))
def test_each_sub_group_has_its_own_step(pools, tmp_path, cell):
    loads_whole(pools, tmp_path, cell)


@STEP
@of(bf16(3, **SUB_GROUPS), bf16(3, 2, **SUB_GROUPS))
def test_step_that_is_not_stored_by_parameter(pools, tmp_path, cell):
    story = UniversalStory(pools, cell, tmp_path).train_and_save()
    for path in tmp_path.glob(f"{CONVERTED}/zero/*/step.pt"):
        path.unlink()
    story.check_full(story.resume())


# --- loads without optimizer states ---

STAGES_1_2 = (over_bf16(), bf16(1, 2), bf16(2), fp16(2, 2), fp32(1))
LOADS = {"noopt": NOOPT, "module": MODULE_ONLY, "both": BOTH}


@fault("universal-module-only", symptom=symptoms.MomentsNotFresh)
@pytest.mark.parametrize("load", (NOOPT, MODULE_ONLY), ids=("noopt", "module"))
@of(*STAGES_1_2)
def test_no_optimizer_states(pools, tmp_path, cell, load):
    story = UniversalStory(pools, cell, tmp_path).train_and_save()
    story.check_weights(story.resume(load), counters=load is NOOPT)


@fault("universal-module-only", symptom=symptoms.MomentsNotRestored)
@of(over_bf16(), bf16(2, 2))
def test_an_engine_keeps_its_own_optimizer_states(pools, tmp_path, cell):
    story = UniversalStory(pools, cell, tmp_path).train_and_save()
    story.check_weights(story.resume(BOTH, trained=2), counters=False, as_symptom={})


# 0.18 looks at what is wanted under ZeRO-3 no more than elsewhere
@(pytest.mark.guard if RELEASE >= (0, 19) else fault("universal-module-only", symptom=symptoms.MomentsNotFresh))
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@of(bf16(3), fp16(3, 2))
def test_no_optimizer_states_under_zero3(pools, tmp_path, cell, load):
    story = UniversalStory(pools, cell, tmp_path).train_and_save()
    story.check_weights(story.resume(load), counters=load is NOOPT)


# --- other optimizers ---


# <= 0.18 takes no param groups for Muon
MUON = (bf16(2, optimizer="muon"), bf16(3, optimizer="muon")) if RELEASE >= (0, 19) else ()


@fault("universal-other-optimizers", symptom=crash("KeyError", "exp_avg"))
@of(over_bf16(optimizer="momentum"), bf16(2, 2, optimizer="momentum"), bf16(3, optimizer="momentum"),
    fp16(3, 2, optimizer="momentum"), fp16(1, optimizer="sgd"), *MUON)  # fmt: skip
def test_optimizers_other_than_adam(pools, tmp_path, cell):
    loads_whole(pools, tmp_path, cell)


@fault("universal-other-optimizers", symptom=crash("KeyError", "exp_avg"))
@of(bf16(2, optimizer="momentum"), bf16(3, 2, optimizer="momentum"))
def test_optimizers_other_than_adam_on_other_ranks(pools, tmp_path, cell):
    loads_elsewhere(pools, tmp_path, cell)


# before 0.18 a load under ZeRO-3 takes what is not Adam's from rank 0: right for scalars and on one rank
@pytest.mark.fault(
    "universal-other-optimizers", symptom=(crash("KeyError", "max_exp_avg_sq"), symptoms.MomentsNotRestored)
)
@of(over_bf16(optimizer="amsgrad"), bf16(2, 2, optimizer="amsgrad"), bf16(3, 1 + ONE_GROUP, optimizer="amsgrad"))
def test_adam_with_another_moment(pools, tmp_path, cell):
    loads_whole(pools, tmp_path, cell)


# padding is stripped from every state before the states are looked at by name
@pytest.mark.fault(
    "universal-other-optimizers", symptom=(crash("KeyError", "mu_product"), crash("RuntimeError", "0-dim tensor"))
)
@of(bf16(2, 2, model="odd", optimizer="nadam"), *(() if ONE_GROUP else (bf16(3, optimizer="nadam"),)))
def test_adam_with_another_scalar(pools, tmp_path, cell):
    loads_whole(pools, tmp_path, cell)


@fault("universal-other-optimizers", symptom=crash("KeyError", "0"))
@of(bf16(3, optimizer="sgd"), bf16(3, 2, optimizer="sgd"))
def test_optimizers_without_states_under_zero3(pools, tmp_path, cell):
    loads_whole(pools, tmp_path, cell)


@fault("universal-other-optimizers", symptom=crash("KeyError", "0"))
@of(bf16(3), bf16(3, 2))
def test_before_the_first_step(pools, tmp_path, cell):
    loads_whole(pools, tmp_path, cell, steps=0)


# --- another precision ---


@fault("universal-loss-scale", symptom=symptoms.LossScaleNotRestored)
@of(bf16(1), bf16(2, 2), fp32(2), bf16(3, groups=1), fp32(3, 2, groups=1))
def test_fp16_keeps_its_dynamic_loss_scale(pools, tmp_path, cell):
    story = UniversalStory(pools, cell, tmp_path).train_and_save()
    resumed = story.resume(cell=variant(cell, precision="fp16"))
    loaded = [r["loaded"] for r in resumed]
    oracle.check(story.saved, loaded, only={*HELD, "moments", "step", "groups", "counters"}, what="after the load")
    oracle.check([r["fresh"] for r in resumed], loaded, only={"scale"}, what="after the load")


@pytest.mark.guard
@of(fp16(2), fp16(3, groups=1))
def test_a_loss_scale_is_not_for_bf16(pools, tmp_path, cell):
    story = UniversalStory(pools, cell, tmp_path).train_and_save()
    loaded = [r["loaded"] for r in story.resume(cell=variant(cell, precision="bf16"))]
    oracle.check(story.saved, loaded, only={*HELD, "moments", "step", "groups", "counters"}, what="after the load")


# --- what is right already ---


@of(over_bf16(), over_bf16(2), bf16(1, 2, groups=3), fp16(2), fp16(2, 2, model="tied"), fp32(1, 2),
    fp16(2, scheduler=True), bf16(2, optimizer="fused"), bf16(3, 2, groups=1), mark=right)  # fmt: skip
def test_a_full_load(pools, tmp_path, cell):
    loads_whole(pools, tmp_path, cell)


@of(
    over_bf16(2, model="odd"),
    bf16(2, model="odd"),
    fp16(1, 2, scheduler=True),
    bf16(3, groups=1, model="odd"),
    fp16(3, 2, groups=1, scheduler=True),
    mark=right,
)
def test_a_full_load_on_other_ranks(pools, tmp_path, cell):
    loads_elsewhere(pools, tmp_path, cell)


# --- a checkpoint that was not converted ---


@pytest.mark.fault("no-universal-advice", symptom=crash("ValueError", "latest_universal does not exist"))
@of(over_bf16(2), *[cell for cell in (bf16(1), fp16(3, 2)) if RELEASE >= (0, 16)])
def test_a_folder_that_was_not_converted(pools, tmp_path, cell):
    ranks, common = pools(cell.world), {"cell": cell, "folder": str(tmp_path)}
    ranks.run("resume.deepspeed.universal:train_and_save", **common)
    outcomes = ranks.outcomes("resume.deepspeed.universal:resume", **common, grace=8.0)
    check_outcomes(outcomes, "ValueError", "latest_universal' does not exist", "ds_to_universal.py")
