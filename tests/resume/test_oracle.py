"""The oracle on made snapshots: every field, dropped, added or altered, is named, and by its own symptom."""

from dataclasses import replace

import pytest
import torch

from resume import oracle, symptoms
from resume.oracle import Snapshot

WHOLE = Snapshot(
    weights={"w": torch.tensor([1.0, 2.0]).bfloat16()},
    buffers={"b": torch.tensor([3.0])},
    masters={"w": torch.tensor([1.0, 2.0])},
    partitions={"flat[0]": torch.tensor([1.0, 2.0])},
    moments={"flat[0].exp_avg": torch.tensor([0.1, 0.2])},
    step={"flat[0]": 3.0},
    groups={"[0].lr": 0.01, "[0].betas": [0.9, 0.999], "[0].name": "decay"},
    scheduler={"last_batch_iteration": 3},
    counters={"global_steps": 3},
    scale={"cur_scale": 256.0},
    client={"epoch": 3, "sampler": {"seed": 17}},
)


def altered(value):
    if torch.is_tensor(value):
        changed = value.clone()
        changed[0] = (
            torch.nextafter(changed[0], torch.tensor(9.0, dtype=value.dtype))
            if value.dtype != torch.bfloat16
            else changed[0] + 0.0078125
        )
        return changed
    if isinstance(value, (int, float)):
        return value + 1e-12 if isinstance(value, float) and value < 1 else value + 1
    if isinstance(value, list):
        return [altered(value[0]), *value[1:]]
    if isinstance(value, dict):
        return {k: altered(v) for k, v in value.items()}
    return value + "x"


CASES = [(kind, name) for kind in oracle.KINDS for name in getattr(WHOLE, kind)]


def with_field(kind, entries):
    return replace(WHOLE, **{kind: entries})


def test_a_snapshot_equals_itself():
    oracle.check([WHOLE, WHOLE], [WHOLE, WHOLE])


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{k}-{n}" for k, n in CASES])
@pytest.mark.parametrize("how", ["dropped", "altered", "added"])
def test_each_difference_is_named_with_its_own_symptom(kind, name, how):
    entries = dict(getattr(WHOLE, kind))
    if how == "dropped":
        del entries[name]
    elif how == "altered":
        entries[name] = altered(entries[name])
    else:
        name = "stray"
        entries[name] = torch.zeros(1)
    with pytest.raises(oracle.KINDS[kind]) as caught:
        oracle.check([WHOLE, WHOLE], [WHOLE, with_field(kind, entries)])
    assert type(caught.value) is oracle.KINDS[kind]
    assert f"rank 1: {kind} {name}" in str(caught.value)


def test_the_first_difference_in_a_persons_order_is_named():
    both = replace(WHOLE, groups={**WHOLE.groups, "[0].lr": 0.5}, weights={"w": torch.zeros(2).bfloat16()})
    with pytest.raises(symptoms.WeightsNotRestored, match="more differ"):
        oracle.check([WHOLE], [both])


@pytest.mark.parametrize(
    "other",
    [torch.ones(2), torch.ones(3).bfloat16(), torch.full((2,), float("nan")).bfloat16()],
    ids=["dtype", "shape", "nan"],
)
def test_dtype_shape_and_nan_count(other):
    with pytest.raises(symptoms.WeightsNotRestored):
        oracle.check([WHOLE], [with_field("weights", {"w": other})])


def test_a_tolerance_has_to_be_asked_for():
    near = with_field("masters", {"w": WHOLE.masters["w"] + 1e-4})
    with pytest.raises(symptoms.MastersStale, match=r"by up to 0\.0001"):
        oracle.check([WHOLE], [near])
    oracle.check([WHOLE], [near], tolerance=2e-4)


def test_an_override_renames_the_symptom():
    with pytest.raises(symptoms.MomentsNotFresh):
        oracle.check([WHOLE], [with_field("moments", {})], as_symptom={"moments": symptoms.MomentsNotFresh})


def test_masters_must_round_to_the_weights():
    oracle.check_masters_follow_weights([WHOLE])
    finer = with_field("masters", {"w": torch.tensor([1.0 + 2**-12, 2.0])})
    oracle.check_masters_follow_weights([finer])
    with pytest.raises(symptoms.MastersStale, match="rank 1: masters w"):
        oracle.check_masters_follow_weights([WHOLE, with_field("masters", {"w": torch.tensor([1.5, 2.0])})])


def test_ranks_must_agree_in_number():
    with pytest.raises(ValueError, match="2 ranks expected, 1 found"):
        oracle.check([WHOLE, WHOLE], [WHOLE])
