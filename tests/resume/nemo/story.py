"""Whole resume stories for the tests: run them on ranks and hold them against the oracle.

Protocol of every story
1. a run trains and saves;
2. a run with another seed, other hyperparameters, and perhaps another
   optimizer and other parallelism, trains a step and loads;
3. right after the load everything equals the save bit for bit: weights, fp32
   masters, moments, step, every hyperparameter of every group; so it does
   after loading the same state dict once more;
4. the further steps equal going on with fused_adam from the saved state,
   which is set by hand;
5. a checkpoint written straight after the load equals the first.

With param remainders weights are the masters rounded half up, where fused_adam
rounds half to even: after the load they equal the masters so rounded, and the
further steps equal those of a fused_adam run that rounds so.  A plain
fused_adam run differs by less than ``bound``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import ClassVar

from resume import oracle, symptoms
from resume.nemo import engines, runs
from resume.nemo.engines import HYPER, Cell
from resume.oracle import Snapshot

ALL = {"weights", "masters", "moments", "step", "groups"}


def merged(snapshots: list[Snapshot]) -> Snapshot:
    """One snapshot with the parameters of all ranks."""

    def join(kind):
        return {k: v for snap in reversed(snapshots) for k, v in getattr(snap, kind).items()}

    return Snapshot(**{kind: join(kind) for kind in ALL})


def bound(steps: int) -> float:
    """By how much masters may differ after ``steps`` because some weights were rounded the other way.

    Gradients then differ arbitrarily, but no update of Adam exceeds lr c: |m| <= c' sqrt(v) with c' =
    (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)) by Cauchy-Schwarz, and bias correction adds sqrt(1 - b2^t) / (1 - b1^t)
    with t > STEPS.
    """
    lr, (b1, b2), first = HYPER["source"]["lr"], HYPER["source"]["betas"], runs.STEPS + 1
    ratio = (1 - b1) / ((1 - b2) * (1 - b1**2 / b2)) ** 0.5
    return 2 * lr * steps * ratio * max(1.0, (1 - b2**first) ** 0.5 / (1 - b1**first))


class Story:
    """A source run's checkpoint in ``folder`` and what becomes of it.

    Runs of the same kind are made once in a process, so ``folder`` is to be read only.
    """

    _sources: ClassVar[dict] = {}
    _references: ClassVar[dict] = {}

    def __init__(self, pools, source: Cell, folder):
        self.pools, self.source, self.folder = pools, source, os.path.join(str(folder), "saved")
        self.again = os.path.join(str(folder), "again")
        self.saved, self.key = Snapshot(), ()

    def train_and_save(self, **kwargs) -> Story:
        self.key = (self.source, repr(sorted(kwargs.items())))
        if self.key not in self._sources:
            found = self.pools(self.source.world).run(
                "resume.nemo.runs:train_and_save", cell=self.source, folder=self.folder, **kwargs
            )
            self._sources[self.key] = self.folder, merged(found)
        self.folder, self.saved = self._sources[self.key]
        return self

    def resume(self, target: Cell, folder: str | None = None, **kwargs) -> list[dict]:
        return self.pools(target.world).run(
            "resume.nemo.runs:resume", cell=target, folder=folder or self.folder, **kwargs
        )

    def check(self, target: Cell, **kwargs) -> None:
        """Resume as ``target`` and hold every step of the protocol."""
        resumed = self.resume(target, again=self.again, **kwargs)
        self.check_loaded(target, resumed)
        self.check_final(target, resumed)
        self.check_loaded(target, self.resume(target, folder=self.again, more=0), "after saving and loading again")

    def check_loaded(self, target: Cell, resumed: list[dict], what: str = "after the load") -> None:
        expected = self.expected(target)
        for key in ("loaded", "twice"):
            oracle.check(
                [expected] * len(resumed),
                [r[key] for r in resumed],
                only=ALL,
                what=what if key == "loaded" else f"{what}, twice",
            )

    def expected(self, target: Cell) -> Snapshot:
        """What ``target`` must hold after the load: the save, its experts marked as the target's parallelism has it."""
        saved = self.saved
        groups = {
            k: target.ep > 1 and ".local_experts." in k if k.endswith(".is_expert") else v
            for k, v in saved.groups.items()
        }
        weights = saved.weights
        if target.masters == "remainders":
            weights = {n: engines.half_up(m) for n, m in saved.masters.items()}
        return replace(saved, groups=groups, weights=weights)

    def check_final(self, target: Cell, resumed: list[dict]) -> None:
        final = [r["final"] for r in resumed]
        diverged = dict.fromkeys(ALL, symptoms.Diverged)
        rounded = target.masters == "remainders"
        expected = self._reference(target, rounded)
        oracle.check(expected, final, only=ALL - {"groups"}, as_symptom=diverged, what="training on")
        if oracle.moved([self.expected(target)] * len(final), final) < 1e-3:
            raise AssertionError("training on moves no weight: it cannot show anything")
        if rounded:
            oracle.check(
                self._reference(target, False),
                final,
                only={"masters"},
                as_symptom=diverged,
                tolerance=bound(runs.MORE),
                what="training on, next to a plain fused_adam run",
            )

    def _reference(self, target: Cell, rounded: bool) -> list[Snapshot]:
        cell = replace(
            target, optimizer="fused", masters="params", hyper="source", order=None, decays=True, lightning=False
        )
        key = (self.key, cell, rounded)
        if key not in self._references:
            self._references[key] = self.pools(cell.world).run(
                "resume.nemo.runs:reference", cell=cell, saved=self.saved, rounded=rounded
            )
        return self._references[key]
