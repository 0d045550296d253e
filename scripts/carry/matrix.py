"""The resume matrix: run every cell of a release in its stack, say what came of them by cause, compare two runs."""

from __future__ import annotations

import collections
import hashlib
import json
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carry.envs import install_stack, site
from carry.errors import CouldNotRun, UserError
from carry.instack import call
from carry.paths import House
from carry.pins import Pin
from carry.progress import say
from carry.schema import fault_in, write_document
from carry.wheels import FLAVOURS, Wheel

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

# the worst first, as tests/matrix/verdicts.py has them
CLASSES = (
    "broken",
    "hang",
    "silent-wrong",
    "crash",
    "unclear-error",
    "refused",
    "clear-error",
    "tolerance",
    "exact",
)
BAD = frozenset(("broken", "hang", "silent-wrong", "unclear-error"))
_NO_CELL = 5  # of tests/matrix/run.py
_LIMIT_S = {"default": 60 * 60, "full": 12 * 60 * 60, "slice": 20 * 60}
SLICE = "ci/matrix-slice.txt"
KNOWN = "ci/matrix-known.toml"
EVERY = "*"  # in place of causes, for a pin whose series is not yet whole


@dataclass(frozen=True)
class Result:
    """One wheel's matrix: the document, and where it was written."""

    document: dict
    path: Path

    @property
    def failed(self) -> bool:
        """Whether a patched wheel has a cell that nothing may leave behind; a pristine one is what it is."""
        broken = any(row["class"] == "broken" for row in self.document["cells"])
        return broken or (
            self.document["flavour"] == "patched" and any(r["class"] in BAD for r in self.document["cells"])
        )


def run(
    house: House, pins: Iterable[Pin], wheels: Iterable[Wheel], flavours: Sequence[str], select: str, cells: str
) -> list[Result]:
    """Run the matrix of every pin, in its first stack, for each of `flavours`, and write dist/matrix/.

    `select`: default, full or slice. `cells`: shell patterns on ids, which take the place of the selection.
    Raises UserError where no pin has a matrix or no cell matches, and as `install_stack` and `site`.
    """
    built = {(str(wheel.pin), wheel.flavour): wheel for wheel in wheels}
    chosen = [pin for pin in pins if pin.upstream.name == "deepspeed"]
    if not chosen:
        raise UserError("no pin asked for has a matrix: it is DeepSpeed's; say UPSTREAM=deepspeed VERSION=<pin>")
    unknown = sorted(set(flavours) - set(FLAVOURS))
    if unknown:
        raise UserError(f"no flavour {unknown[0]!r}; there is: {', '.join(FLAVOURS)}")
    return [_run(house, pin, built[str(pin), flavour], select, cells) for pin in chosen for flavour in flavours]


def _run(house: House, pin: Pin, wheel: Wheel, select: str, cells: str) -> Result:
    env = install_stack(house, pin.stacks[0])
    folder = site(house, env, wheel.path.name, wheel.sha256)
    name = f"{pin.upstream.name}-{pin.version}-{wheel.flavour}-{env.stack.name}"
    say(f"running the matrix of {wheel.path.name} in {env.stack.name}")
    rows = house.build / "matrix" / f"{name}-{select}-{_inputs(house, wheel, env.stack.sha256)}.jsonl"
    with tempfile.TemporaryDirectory(prefix="carry-matrix-") as scratch:
        out = Path(scratch) / "cells.json"
        command = [
            str(env.python), "-W", "ignore", "-m", "matrix.run", "--version", pin.version, "--out", str(out),
            *(["--rows", str(rows)] if not cells else []),  # cells that are asked for by name run
            *(["--full"] if select == "full" else []), *(["--cells", cells] if cells else []),
        ]  # fmt: skip
        code = call(house, command, [folder, house.tests], f"matrix-{name}", _LIMIT_S[select])
        if code == _NO_CELL:
            raise UserError(f"{pin}: no cell matches CELLS={cells}; an id is, for one, bf16-z1-dense-adamw-1-full")
        if code or not out.exists():
            raise CouldNotRun(f"the matrix ended with code {code}; see build/logs/matrix-{name}.log")
        found = json.loads(out.read_bytes())
    document = {
        "schema": 1,
        "upstream": pin.upstream.name,
        "version": pin.version,
        "flavour": wheel.flavour,
        "stack": {
            "name": env.stack.name,
            "sha256": env.stack.sha256,
            "python": env.python_version,
            "torch": env.torch,
        },
        "wheel": {"file": wheel.path.name, "sha256": wheel.sha256},
        "selection": cells or select,
        "counts": counts(found["cells"]),
        **found,
    }
    # the file of the whole is not overwritten by a part
    path = house.matrices / ("" if select != "slice" and not cells else "part") / f"{name}.json"
    write_document(document, "matrix", path)
    if not cells:
        for old in rows.parent.glob(f"{name}-{select}-*.jsonl"):
            old.unlink()
    return Result(document, path)


def _inputs(house: House, wheel: Wheel, stack_sha256: str) -> str:
    """What a row depends on: the wheel, the stack and the tests; rows of other inputs say nothing."""
    digest = hashlib.sha256(f"{wheel.sha256} {stack_sha256}".encode())
    for path in sorted(p for folder in ("matrix", "resume") for p in (house.tests / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(house.tests)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def counts(rows: Sequence[Mapping]) -> dict[str, int]:
    """Cells of every class that has some, the worst class first."""
    seen = collections.Counter(row["class"] for row in rows)
    return {name: seen[name] for name in CLASSES if seen[name]}


def causes(rows: Sequence[Mapping]) -> dict[tuple[str, str], list[Mapping]]:
    """Rows that did not resume by (class, cause): the worst class first, in it the commonest cause."""
    found: dict[tuple[str, str], list[Mapping]] = {}
    for row in rows:
        if row["class"] not in ("exact", "tolerance"):
            found.setdefault((row["class"], row["cause"]), []).append(row)
    return dict(sorted(found.items(), key=lambda item: (CLASSES.index(item[0][0]), -len(item[1]), item[0][1])))


def table(document: Mapping) -> str:
    """Cells by cause with an example each, counts by class, and the command that runs one cell again."""
    rows = document["cells"]
    grouped = causes(rows)
    lines = []
    for (cls, cause), members in grouped.items():
        stages = ",".join(sorted({str(r["axes"]["stage"]) for r in members}))
        precisions = ",".join(sorted({r["axes"]["precision"] for r in members}))
        lines.append(f"{len(members):5}  {cls:13}  {cause}  [z{stages}; {precisions}]  {members[0]['id']}")
    shown = ", ".join(f"{name} {number}" for name, number in document["counts"].items())
    total = f"{len(rows)} cells in {document['duration_s']:.0f} s, {document['cells_per_s']:.1f}/s: {shown}"
    if grouped:
        again = next(iter(grouped.values()))[0]["id"]
        lines.append(f"one cell again: {rerun(document, again)}")
    if document["coverage"]:
        total += f"; {document['coverage']['covered']} of {document['coverage']['possible']} pairs"
    title = f"{document['upstream']} {document['version']} {document['flavour']}, {document['stack']['name']}"
    return "\n".join([title, *lines, total])


def rerun(document: Mapping, cell: str) -> str:
    """The command that runs one cell of a document alone."""
    return (
        f"make matrix UPSTREAM={document['upstream']} VERSION={document['version']} FLAVOUR={document['flavour']} "
        f"CELLS={shlex.quote(cell)}"
    )


def read(path: Path) -> dict:
    """A file of dist/matrix/. Raises UserError where it is none."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `make matrix` writes it below dist/matrix/") from None
    except ValueError:
        raise UserError(f"{path}: not JSON; make it again with `make matrix`") from None
    wrong = fault_in(document, "matrix")
    if wrong:
        raise UserError(f"{path}: malformed at {wrong}; make it again with `make matrix`")
    return document


@dataclass(frozen=True)
class Changes:
    """Cells of two runs that differ: (id, class before, class after); ``new`` and ``gone`` are in one only."""

    better: list[tuple[str, str, str]]
    worse: list[tuple[str, str, str]]
    new: list[str]
    gone: list[str]
    same: int

    def lines(self) -> list[str]:
        found = [f"{word}  {i}  {a} -> {b}" for word in ("worse", "better") for i, a, b in getattr(self, word)]
        found += [f"{word}  {i}" for word in ("new", "gone") for i in getattr(self, word)]
        total = ", ".join(f"{len(getattr(self, word))} {word}" for word in ("better", "worse", "new", "gone"))
        return [*found, f"{total}, {self.same} the same"]


def compare(before: Mapping, after: Mapping) -> Changes:
    """What changed from one document to another, cell by cell; a class nearer to `exact` is better."""
    old, new = ({row["id"]: row["class"] for row in document["cells"]} for document in (before, after))
    both = [(i, old[i], new[i]) for i in old if i in new]
    rank = CLASSES.index
    return Changes(
        better=[c for c in both if rank(c[2]) > rank(c[1])],
        worse=[c for c in both if rank(c[2]) < rank(c[1])],
        new=[i for i in new if i not in old],
        gone=[i for i in old if i not in new],
        same=sum(a == b for _, a, b in both),
    )


def slice_patterns(house: House) -> str:
    """The ids of the CI slice, as --cells takes them."""
    text = (house.root / SLICE).read_text(encoding="utf-8")
    return ",".join(line.split("#")[0].strip() for line in text.splitlines() if line.split("#")[0].strip())


def known(house: House, pin: str) -> dict[str, str]:
    """Cause -> reason, of what the slice may still show on the patched wheel of `pin` ("deepspeed 0.19.8")."""
    document = tomllib.loads((house.root / KNOWN).read_text(encoding="utf-8"))
    return document.get(pin, {})


def unknown(house: House, results: Iterable[Result]) -> list[str]:
    """Bad cells of patched wheels whose cause is not listed, and listed causes that nothing shows; one line each.

    A pin that lists "*" may show any, and must show some.
    """
    found = []
    for result in results:
        document = result.document
        pin = f"{document['upstream']} {document['version']}"
        listed = known(house, pin)
        bad = {cause: rows for (cls, cause), rows in causes(document["cells"]).items() if cls in BAD}
        found += [
            f"{pin}: {rows[0]['class']}: {cause}: {rows[0]['message']}; {rerun(document, rows[0]['id'])}"
            for cause, rows in bad.items()
            if cause not in listed and EVERY not in listed
        ]
        if EVERY in listed:
            cells = sum(map(len, bad.values()))
            say(f"{pin}: {cells} bad cells of {len(bad)} causes are let pass, as {KNOWN} says: {listed[EVERY]}")
            if bad:
                continue
        found += [
            f"{pin}: {cause!r} is listed in {KNOWN} and shows no more; remove it"
            for cause in listed
            if cause not in bad
        ]
    return found
