"""The parent: drives pools of ranks through the cells of one release and writes what came of each, as JSON.

Protocol
1. Cells that load what the same training saved are a group; a group's training runs once, its checkpoint is converted
   once, and where a mode damages files it gets a copy of them, by hard links.
2. Two threads take groups; each has a pool of ranks per world size. A crash, a hang or a death costs its cell only.
3. A rank that fails while another stays away for ``grace`` seconds is a hang, whatever the others would have said.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from resume.deepspeed import cpu_adam
from resume.ranks import Ranks

from matrix import verdicts
from matrix.cells import NAMES, RULES, Cell, Setup, matching, valid
from matrix.modes import Mode
from matrix.pairs import select
from matrix.verdicts import Verdict

MOVED = 1e-3  # a hundred times expected.TOLERANCE: a run that moves its weights by less shows nothing
NO_CELL = 5  # exit code; 1 is Python's own for an exception
COLD, WARM, GRACE = 180.0, 60.0, 6.0
JOBS = 60  # of a pool: the process groups of every engine stay, and their threads take the processors, idle or not


class Training(NamedTuple):
    """What decides the bytes of a checkpoint: cells with the same one share it."""

    setup: Setup
    steps: int
    save: tuple
    tag: Any
    newer: bool
    save16: bool

    @classmethod
    def of(cls, cell: Cell) -> Training:
        mode = cell.how
        return cls(
            cell.saved_by, mode.steps, tuple(mode.save.items()), mode.tag, "later:newer" in mode.damage,
            mode.how == "save16",
        )  # fmt: skip

    @property
    def name(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


class Pools:
    """One worker's rank processes, one pool per world size."""

    def __init__(self) -> None:
        self._made: dict[int, Ranks] = {}
        self._jobs: collections.Counter = collections.Counter()

    def __call__(self, world: int, target: str, **kwargs: Any) -> list:
        """Each rank's result or exception of ``matrix.jobs:target``."""
        pool = self._made.setdefault(world, Ranks(world, "resume.deepspeed.compat:setup", "matrix.preload"))
        self._jobs[world] += 1
        if self._jobs[world] > JOBS:
            pool.stop()
        if not pool._procs:
            self._jobs[world] = 1
            pool.start()
            pool.outcomes("matrix.jobs:warm", timeout=COLD, grace=COLD)
        return pool.outcomes(f"matrix.jobs:{target}", timeout=WARM, grace=GRACE, **kwargs)

    def stop(self) -> None:
        for pool in self._made.values():
            pool.stop()


def damage(folder: Path, tag: str | None, verbs: Sequence[str]) -> bool:
    """Do to a checkpoint what the verbs say; whether there was anything to do it to."""
    done = False
    inside = folder / str(tag)
    found = {
        "latest": [p for p in (folder / "latest", folder / "latest_universal") if p.exists()],
        "optim": sorted(inside.glob("*optim_states.pt")),
        "shard": sorted(inside.glob("*optim_states.pt"))[-1:],
        "model": sorted(inside.glob("*model_states.pt")),
        "folder": [folder],
    }
    for verb, what in (v.split(":") for v in verbs):
        for path in found.get(what, ()):
            done = True
            if verb == "delete":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif verb == "cut":
                content = path.read_bytes()
                path.unlink()  # the other name of the file keeps its bytes
                path.write_bytes(content[: len(content) // 2])
    return done


class Group:
    """The cells of one training, in one folder."""

    def __init__(self, training: Training, cells: Sequence[Cell], scratch: Path, pools: Pools):
        self.training, self.cells, self.pools = training, cells, pools
        self.folder = scratch / training.name
        self.saved = self.folder / "saved"

    def run(self) -> Iterable[tuple[Cell, Verdict, float]]:
        self.folder.mkdir()
        try:
            yield from self._run()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self) -> Iterable[tuple[Cell, Verdict, float]]:
        world = self.training.setup.world
        ended = self.pools(world, "train", setup=self.training.setup, mode=self.cells[0].how, folder=str(self.folder))
        failed = any(isinstance(one, BaseException) for one in ended)
        moved = 0.0 if failed else max(ended)
        if not failed and moved < MOVED:
            message = f"the run moves its weights by only {moved:.3g}"
            yield from ((c, Verdict("broken", "nothing moves", message), 0.0) for c in self.cells)
            return
        if failed:
            yield from ((c, verdicts.of_ranks(c, ended, None, "save"), 0.0) for c in self.cells)
            return
        tag = "newer" if self.training.newer else self._tag()
        converted = None
        for cell in self.cells:
            started = time.monotonic()
            if cell.how.how == "universal" and converted is None:
                converted = self.pools(
                    world, "convert", folder=str(self.saved), tag=tag, out=str(self.folder / "universal")
                )
            if cell.how.how == "universal" and any(isinstance(one, BaseException) for one in converted):
                verdict = verdicts.of_ranks(
                    cell, [e for e in converted if isinstance(e, BaseException)], None, "convert"
                )
            else:
                verdict = self._load(cell)
            yield cell, verdict, time.monotonic() - started

    def _tag(self) -> str:
        return (self.saved / "latest").read_text() if (self.saved / "latest").exists() else str(self.training.tag)

    def _load(self, cell: Cell) -> Verdict:
        mode = cell.how
        saved, copy = (self.folder / "universal" if mode.how == "universal" else self.saved), None
        verbs, lacks = [v for v in mode.damage if not v.startswith("later")], lacking(mode, cell.stage)
        if verbs:
            copy = self.folder / "damaged"
            shutil.copytree(saved, copy, copy_function=os.link)
            done = damage(copy, self._tag() if mode.tag is None else str(mode.tag), verbs)
            lacks, saved = lacks if done else None, copy
        try:
            ended = self.pools(cell.worlds[1], "load", cell=cell, folder=str(self.folder), saved=str(saved))
        finally:
            for path in self.folder.glob("damaged*"):
                shutil.rmtree(path, ignore_errors=True)
            for path in self.folder.glob("*-again"):
                shutil.rmtree(path, ignore_errors=True)
        return verdicts.of_ranks(cell, ended, lacks)


def lacking(mode: Mode, stage: int) -> str | None:
    """Why a checkpoint of ``stage`` cannot give what the mode asks for, or None."""
    return mode.lacks if mode.lacks_at is None or stage in mode.lacks_at else None


def groups_of(cells: Iterable[Cell]) -> list[tuple[Training, list[Cell]]]:
    """Cells by training; those of one rank first, so that pools are not mixed."""
    found: dict[Training, list[Cell]] = {}
    for cell in cells:
        found.setdefault(Training.of(cell), []).append(cell)
    for members in found.values():
        members.sort(key=lambda c: (max(c.worlds), c.how.how))
    return sorted(found.items(), key=lambda item: (max(max(c.worlds) for c in item[1]), item[0].name))


def row(cell: Cell, verdict: Verdict, seconds: float) -> dict[str, Any]:
    return {
        "id": cell.id,
        "axes": {name: getattr(cell, name) for name in NAMES},
        "class": verdict.cls,
        "cause": verdict.cause,
        "message": verdict.message,
        "duration_s": round(seconds, 3),
        "cpu_s": verdict.cpu_s,
    }


class Kept:
    """Rows of cells that have run, a line each as they end: what an interrupted run has done is not done again."""

    def __init__(self, path: Path | None):
        self.rows: dict[str, dict] = {}
        self._path, self._lock = path, threading.Lock()
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be cut
        self.rows = {found["id"]: found for found in whole if found["class"] != "broken"}
        path.write_text("".join(json.dumps(found) + "\n" for found in self.rows.values()))

    def add(self, found: dict[str, Any]) -> None:
        with self._lock:
            self.rows[found["id"]] = found
            if self._path:
                with open(self._path, "a") as file:
                    file.write(json.dumps(found) + "\n")


def run(cells: Sequence[Cell], scratch: Path, workers: int, say, kept: Kept) -> list[dict[str, Any]]:
    """Every cell's row, in the order of ``cells``; those that are in ``kept`` do not run."""
    todo: queue.SimpleQueue = queue.SimpleQueue()
    rows = kept.rows
    for item in groups_of(cell for cell in cells if cell.id not in rows):
        todo.put(item)
    before = sum(cell.id in rows for cell in cells)
    if before:
        say(f"{before} of {len(cells)} cells were run before the last run was interrupted")
    failures: list[BaseException] = []

    def work() -> None:
        pools = Pools()
        try:
            while True:
                try:
                    training, members = todo.get_nowait()
                except queue.Empty:
                    return
                for cell, verdict, seconds in Group(training, members, scratch, pools).run():
                    kept.add(row(cell, verdict, seconds))
        except BaseException as error:
            failures.append(error)
        finally:
            pools.stop()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    started = said = time.monotonic()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        if time.monotonic() - said > 2:
            said = time.monotonic()
            say(progress(list(rows.values()), len(cells), before, said - started))
    if failures:
        raise failures[0]
    say(progress(list(rows.values()), len(cells), before, time.monotonic() - started))
    return [rows[cell.id] for cell in cells]


def progress(rows: Sequence[dict], total: int, before: int, seconds: float) -> str:
    """``before``: how many of ``rows`` were there at the start, ``seconds`` ago."""
    counts = collections.Counter(r["class"] for r in rows)
    shown = ", ".join(f"{name} {counts[name]}" for name in verdicts.CLASSES if counts[name])
    rate = (len(rows) - before) / max(seconds, 1e-9)
    return f"{len(rows)}/{total} cells, {rate:.1f}/s: {shown or 'starting'}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="matrix.run", description=__doc__)
    parser.add_argument("--version", required=True, help="the release, x.y.z")
    parser.add_argument("--full", action="store_true", help="every cell, not only enough for every pair")
    parser.add_argument(
        "--cells", default="", help="comma-separated shell patterns on ids; of all cells, not the default"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=Path, help="keep rows here as cells end, and run no cell that it has a row of")
    parser.add_argument("--out", required=True, help="the JSON to write")
    args = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    every, dropped = valid(tuple(map(int, args.version.split("."))))
    if args.cells:
        chosen, coverage = matching(every, args.cells), None
        if not chosen:
            say(f"no cell matches {args.cells!r}; an id is, for one, {every[0].id}")
            return NO_CELL
    elif args.full:
        chosen, coverage = list(every), None
    else:
        selection = select(every)
        chosen, coverage = selection.cells, {"covered": selection.covered, "possible": selection.possible}
        say(f"{len(chosen)} of {len(every)} cells hold {selection.covered} of {selection.possible} pairs of values")
    for rule in RULES:
        if dropped[rule.name]:
            say(f"left out: {dropped[rule.name]:6} {rule.name}: {rule.reason}")
    if any(cell.optimizer == "cpuadam" for cell in chosen):
        say("compiling CPUAdam: minutes the first time")
        cpu_adam.compiled()
    kept = Kept(args.rows)
    todo = sum(cell.id not in kept.rows for cell in chosen)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="carry-matrix-") as scratch:
        rows = run(chosen, Path(scratch), args.workers, say, kept)
    seconds = time.monotonic() - started
    document = {
        "coverage": coverage,
        "left_out": {rule.name: {"cells": dropped[rule.name], "reason": rule.reason} for rule in RULES},
        "duration_s": round(seconds, 1),
        "cells_per_s": round(todo / seconds, 2),
        "cells": rows,
    }
    Path(args.out).write_text(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
