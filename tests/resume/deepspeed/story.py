"""Whole resume stories for the tests: run them on ranks and hold them against the oracle.

Protocol of every story
1. a run trains, saves, and trains on: the *uninterrupted* run;
2. a freshly seeded engine loads and trains on over the same batches;
3. right after the load everything the load was asked for equals the save, and
   everything it was not asked for equals a new engine's;
4. the further steps equal the uninterrupted run (full load) or a new run that
   starts from the checkpoint's weights with a fresh optimizer (weights only).
"""

from __future__ import annotations

from dataclasses import replace

from resume import oracle, symptoms, wheel
from resume.deepspeed import kept
from resume.deepspeed.engines import Cell

# the release under test, as far as tests differ by it
RELEASE = tuple(int(part) for part in wheel.installed("deepspeed").version.split(".")[:2])
# 0.13 to 0.16 keep the optimizer states of bf16 in files as ZeRO's, without ZeRO as well
OWN_FILES = (0, 13) <= RELEASE < (0, 17)
# what a load without optimizer states must leave as a new engine has it
FRESH = {"moments": symptoms.MomentsNotFresh, "step": symptoms.StepNotRestored}
NOOPT = {"load_optimizer_states": False}
MODULE_ONLY = {"load_module_only": True}
BOTH = {**NOOPT, **MODULE_ONLY}


class Story:
    """One cell's runs on one pool of ranks, in one folder."""

    def __init__(self, pools, cell: Cell, folder):
        self.ranks, self.cell, self.folder = pools(cell.world), cell, str(folder)
        self.trained: list[dict] = []

    def _run(self, name: str, **kwargs) -> list[dict]:
        return self.ranks.run(f"resume.deepspeed.runs:{name}", **kwargs)

    def train_and_save(self, **kwargs) -> Story:
        cell = replace(self.cell, load_from_fp32=None)  # an option of loads: the run and its files are the same
        self.trained = kept.once(
            f"train {cell} {kwargs}",
            lambda folder: self._run("train_and_save", cell=cell, folder=folder, **kwargs),
            self.folder,
        )
        moved = oracle.moved([r["saved"] for r in self.trained], [r["final"] for r in self.trained])
        if moved < 1e-3:
            raise AssertionError(f"the run moves its weights by only {moved}: it cannot show anything")
        return self

    @property
    def saved(self) -> list[oracle.Snapshot]:
        return [r["saved"] for r in self.trained]

    def resume(self, load: dict | None = None, cell: Cell | None = None, **kwargs) -> list[dict]:
        resumed = self._run("resume", cell=cell or self.cell, folder=self.folder, load=load, **kwargs)
        if any(r["path"] is None for r in resumed):
            raise symptoms.NothingLoaded(f"load_checkpoint({load}) returned no path")
        return resumed

    def reference(self, cell: Cell, weights: list[dict], partitions: list[dict] | None = None) -> list[dict]:
        """``runs.reference`` of every rank."""
        prints = kept.fingerprint(weights), kept.fingerprint(partitions or [])
        return kept.once(
            f"reference {cell} {prints}",
            lambda _: self._run("reference", cell=cell, weights=weights, partitions=partitions),
        )

    def check_full(self, resumed: list[dict]) -> None:
        """A full load: everything is the save's, and the further steps are the uninterrupted run's."""
        oracle.check(self.saved, [r["loaded"] for r in resumed], what="after the load")
        self.check_final([r["final"] for r in self.trained], resumed)

    def check_weights_only(
        self, resumed: list[dict], counters: bool, saved: list[oracle.Snapshot] | None = None, cell: Cell | None = None
    ) -> None:
        """A load without optimizer states.

        Weights and buffers are the save's; masters are the loaded weights' (or, where the checkpoint's own fp32
        masters were read, exactly those); moments and step are a new optimizer's; then the further steps are those
        of a new run from the same weights.  ``counters``: whether global_steps and the client state were asked
        for (yes without ``load_module_only``).  ``saved``: snapshots to hold the load against, default the save's.
        """
        saved, cell = saved or self.saved, cell or self.cell
        loaded = [r["loaded"] for r in resumed]
        what = "after the load"
        oracle.check(saved, loaded, only={"weights", "buffers"}, what=what)
        own_masters = cell.precision != "fp32" and not any(
            oracle.differences(s, now, only={"partitions"}) for s, now in zip(saved, loaded, strict=True)
        )
        oracle.check_masters_follow_weights(loaded, what)
        reference = self.reference(
            replace(cell, load_from_fp32=None),
            [s.weights for s in saved],
            [s.partitions for s in saved] if own_masters else None,
        )
        fresh = [r["fresh"] for r in reference]
        oracle.check(
            fresh,
            loaded,
            only={"masters", "partitions", "moments", "step", "groups", "scale"},
            as_symptom=FRESH,
            what=what,
        )
        if counters:
            oracle.check(saved, loaded, only={"counters", "client"}, what=what)
        else:
            oracle.check(fresh, loaded, only={"counters"}, what=what)
            oracle.check(saved, loaded, only={"client"}, what=what)
        self.check_final([r["final"] for r in reference], resumed)

    @staticmethod
    def check_final(expected: list[oracle.Snapshot], resumed: list[dict]) -> None:
        """The further steps: same weights, masters, moments and groups, bit for bit. Raises ``Diverged``."""
        same = {"weights", "masters", "partitions", "moments", "step", "groups", "scale"}
        oracle.check(
            expected,
            [r["final"] for r in resumed],
            only=same,
            what="training on",
            as_symptom=dict.fromkeys(same, symptoms.Diverged),
        )

    @staticmethod
    def check_no_optimizer_file(resumed: list[dict]) -> None:
        """No rank opened an optimizer file during the load."""
        for rank, result in enumerate(resumed):
            opened = [f for f in result["opened"] if "optim_states" in f]
            if opened:
                raise symptoms.OptimizerFileOpened(f"rank {rank} opened {', '.join(opened)}")


def cells(precisions=("bf16", "fp16", "fp32"), stages=(0, 1, 2, 3), worlds=(1, 2), **common) -> list[Cell]:
    """The product of the usual axes."""
    return [Cell(precision=p, stage=s, world=w, **common) for p in precisions for s in stages for w in worlds]


def loads(cell: Cell) -> bool:
    """Whether the pristine release loads anything: 0.17 does not where it trains bf16 with the wrappers of fp16."""
    return RELEASE != (0, 17) or cell.precision != "bf16" or (cell.stage > 0 and cell.grad_accum is None)


# what such a load ends in
ANY_LOAD = symptoms.crash("AttributeError", "Optimizer' object has no attribute")


def variant(cell: Cell, **changes) -> Cell:
    """``cell`` with some fields changed."""
    return replace(cell, **changes)
