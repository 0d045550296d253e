"""What "resumed" means: a snapshot of a run, and the first thing that differs between two.

A ``Snapshot`` is one rank's view, taken by a framework's adapter:

========== =================================================================
weights    full parameters by name, in the dtype the model trains in
buffers    buffers by name
masters    full fp32 master weights by parameter name
partitions this rank's own fp32 master tensors, as the optimizer holds them
moments    this rank's optimizer state tensors (all but ``step``)
step       the optimizer's step, per state entry or group
groups     every hyperparameter of every param group
scheduler  the scheduler's state
counters   global_steps, global_samples, skipped_steps, micro_steps
scale      the loss scaler's state
client     the client state that the load returned
========== =================================================================

Everything is compared exactly: both sides run the same arithmetic on the same
machine.  A tolerance must be asked for and is absolute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from resume import symptoms


@dataclass(frozen=True)
class Snapshot:
    """One rank's state of a training run; every field maps a name to a tensor or a plain value."""

    weights: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    masters: dict[str, Any] = field(default_factory=dict)
    partitions: dict[str, Any] = field(default_factory=dict)
    moments: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    scale: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)


# field -> symptom, in the order in which a person would look
KINDS = {
    "weights": symptoms.WeightsNotRestored,
    "buffers": symptoms.BuffersNotRestored,
    "masters": symptoms.MastersStale,
    "partitions": symptoms.MastersStale,
    "moments": symptoms.MomentsNotRestored,
    "step": symptoms.StepNotRestored,
    "groups": symptoms.GroupsNotRestored,
    "scheduler": symptoms.SchedulerNotRestored,
    "counters": symptoms.CountersNotRestored,
    "scale": symptoms.LossScaleNotRestored,
    "client": symptoms.ClientStateNotRestored,
}


@dataclass(frozen=True)
class Difference:
    """One thing that is not as expected. ``by`` is the largest absolute difference, where that has a meaning."""

    kind: str
    name: str
    text: str
    by: float = math.nan

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.text}"


def _compare(expected: Any, actual: Any, tolerance: float) -> tuple[str, float] | None:
    if torch.is_tensor(expected) or torch.is_tensor(actual):
        if not (torch.is_tensor(expected) and torch.is_tensor(actual)):
            both = [x.item() if torch.is_tensor(x) and x.numel() == 1 else x for x in (expected, actual)]
            if any(torch.is_tensor(x) for x in both):
                return f"expected {type(expected).__name__}, found {type(actual).__name__}", math.nan
            return _compare(*both, tolerance)
        if expected.shape != actual.shape:
            return f"expected shape {tuple(expected.shape)}, found {tuple(actual.shape)}", math.nan
        if expected.dtype != actual.dtype:
            return f"expected {expected.dtype}, found {actual.dtype}", math.nan
        if torch.equal(expected, actual):
            return None
        gap = (expected.double() - actual.double()).abs()
        by = float("inf") if not torch.isfinite(gap).all() else gap.max().item()
        if by <= tolerance:
            return None
        return f"{int((gap != 0).sum())} of {gap.numel()} elements differ, by up to {by:.3g}", by
    if isinstance(expected, float) and isinstance(actual, (int, float)) and not isinstance(actual, bool):
        by = abs(expected - actual)
        same = expected == actual or (math.isnan(expected) and math.isnan(actual)) or by <= tolerance
        return None if same else (f"expected {expected!r}, found {actual!r}", by)
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        if len(expected) != len(actual):
            return f"expected {len(expected)} items, found {len(actual)}", math.nan
        for i, (one, other) in enumerate(zip(expected, actual, strict=True)):
            found = _compare(one, other, tolerance)
            if found:
                return f"[{i}] {found[0]}", found[1]
        return None
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in (*expected, *(k for k in actual if k not in expected)):
            if key not in actual or key not in expected:
                return f"[{key!r}] is {'missing' if key not in actual else 'unexpected'}", math.nan
            found = _compare(expected[key], actual[key], tolerance)
            if found:
                return f"[{key!r}] {found[0]}", found[1]
        return None
    return None if expected == actual else (f"expected {expected!r}, found {actual!r}", math.nan)


def differences(expected: Snapshot, actual: Snapshot, only=None, tolerance: float = 0.0) -> list[Difference]:
    """Everything in ``actual`` that is not as in ``expected``, in ``KINDS`` order.

    ``only``: the fields to compare (default: all).  ``tolerance``: absolute, for floats and tensors.
    """
    found = []
    for kind in KINDS:
        if only is not None and kind not in only:
            continue
        want, have = getattr(expected, kind), getattr(actual, kind)
        for name in (*want, *(n for n in have if n not in want)):
            if name not in have:
                found.append(Difference(kind, name, "missing"))
            elif name not in want:
                found.append(Difference(kind, name, "unexpected"))
            else:
                result = _compare(want[name], have[name], tolerance)
                if result:
                    found.append(Difference(kind, name, *result))
    return found


def check(
    expected: list[Snapshot],
    actual: list[Snapshot],
    only=None,
    tolerance: float = 0.0,
    as_symptom: dict[str, type] | None = None,
    what: str = "",
) -> None:
    """Raise the symptom of the first difference on any rank.

    ``expected`` and ``actual``: one snapshot a rank.  ``as_symptom`` overrides the symptom of a field
    (a moment that should be fresh is another loss than one that should be restored).  ``what`` leads the message.
    """
    if len(expected) != len(actual):
        raise ValueError(f"{len(expected)} ranks expected, {len(actual)} found")
    kinds = {**KINDS, **(as_symptom or {})}
    order = list(KINDS)
    found = [
        (order.index(d.kind), rank, d)
        for rank, (one, other) in enumerate(zip(expected, actual, strict=True))
        for d in differences(one, other, only, tolerance)
    ]
    if found:
        _, rank, first = min(found, key=lambda f: f[:2])
        more = f" ({len(found) - 1} more differ)" if len(found) > 1 else ""
        raise kinds[first.kind](f"{what + ': ' if what else ''}rank {rank}: {first}{more}")


def check_masters_follow_weights(snapshots: list[Snapshot], what: str = "") -> None:
    """Raise ``MastersStale`` unless every fp32 master, rounded to the weight's dtype, is that weight."""
    for rank, snap in enumerate(snapshots):
        for name, weight in snap.weights.items():
            if name not in snap.masters:
                continue
            master = snap.masters[name].to(weight.dtype).reshape(weight.shape)
            if not torch.equal(master, weight):
                by = (master.double() - weight.double()).abs().max().item()
                raise symptoms.MastersStale(
                    f"{what + ': ' if what else ''}rank {rank}: masters {name}: "
                    f"rounded to {weight.dtype} it is not the weight, by up to {by:.3g}"
                )


def moved(before: list[Snapshot], after: list[Snapshot]) -> float:
    """The largest change of any weight between two snapshots: whether a run did anything at all."""
    return max(
        (one.weights[n].double() - other.weights[n].double()).abs().max().item()
        for one, other in zip(before, after, strict=True)
        for n in one.weights
    )


def without(snapshot: Snapshot, *kinds: str) -> Snapshot:
    """A copy with some fields emptied."""
    return replace(snapshot, **{kind: {} for kind in kinds})
