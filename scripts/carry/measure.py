"""The cost of one thing against another's, as a ratio of medians.

Ratios are of CPU seconds, user and system, of this process and of every process
that ended under it: on a busy machine wall time measures the neighbours.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Cost(NamedTuple):
    """Seconds of processor, children's included, and seconds on the clock."""

    cpu_s: float
    wall_s: float


class Goal(NamedTuple):
    """`of` is `ratio`, of CPU seconds, or `ours_cpu_s`."""

    of: str
    at_most: float


class Round(NamedTuple):
    ours: Cost
    peer: Cost


@dataclass(frozen=True)
class Result:
    """One comparison: `what` of ours against `peer`; `name` is also its file's in dist/bench/."""

    name: str
    what: str
    peer: str
    goal: Goal
    rounds: tuple[Round, ...]

    def median(self, side: str, of: str) -> float:
        """Seconds of `side`, `ours` or `peer`; `of` is a field of Cost."""
        return statistics.median(getattr(getattr(one, side), of) for one in self.rounds)

    def ratio(self, of: str) -> float:
        return self.median("ours", of) / self.median("peer", of)

    @property
    def met(self) -> bool:
        of_ours = self.goal.of == "ours_cpu_s"
        return (self.median("ours", "cpu_s") if of_ours else self.ratio("cpu_s")) <= self.goal.at_most

    def document(self) -> dict:
        """The JSON of schemas/bench.schema.json."""
        return {
            "schema": 1,
            "name": self.name,
            "what": {"ours": self.what, "peer": self.peer},
            "median": {side: {of: self.median(side, of) for of in Cost._fields} for side in Round._fields},
            "ratio": {of: self.ratio(of) for of in Cost._fields},
            "goal": {**self.goal._asdict(), "met": self.met},
            "rounds": [{side: cost._asdict() for side, cost in one._asdict().items()} for one in self.rounds],
        }


def table(results: Sequence[Result]) -> str:
    """What was compared, CPU seconds, ratios and goals, aligned for a terminal."""
    rows = [("what", "ours", "peer", "", "ratio", "goal", "", "wall ratio")]
    rows += [
        (
            result.what,
            f"{result.median('ours', 'cpu_s'):.3f} s",
            f"{result.median('peer', 'cpu_s'):.3f} s",
            result.peer,
            f"{result.ratio('cpu_s'):.3f}",
            f"<= {result.goal.at_most:g}" + ("" if result.goal.of == "ratio" else " s of ours"),
            "met" if result.met else "MISSED",
            f"{result.ratio('wall_s'):.3f}",
        )
        for result in results
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "Medians of CPU seconds, user and system, child processes included."])


def cost(action: Callable[[], object]) -> Cost:
    """What `action` costs. A child counts once it has been waited for."""

    def cpu() -> float:
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    before, start = cpu(), time.monotonic()
    action()
    return Cost(cpu() - before, time.monotonic() - start)
