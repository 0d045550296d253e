"""What the gate found, for people and machines: a table, report.json, report.md, and annotations."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from carry.actions import annotation
from carry.bump import ANEW, SHARED, Judged, Other, Outcome
from carry.errors import CarryError
from carry.paths import House
from carry.schema import fault_in
from carry.verdicts import CARRY, FIX, Behaviour, Run, counted

_MEANING = {
    0: "everything is carried",
    10: "review: something can be dropped, was rebased, or is new",
    11: "a patch has to be mended",
    12: "undecided",
    13: "behaviour could not be run",
}


def document(outcome: Outcome) -> dict:
    """The JSON of schemas/bump.schema.json."""
    return {
        "schema": 1,
        "upstream": outcome.pin.upstream.name,
        "from": outcome.pin.version,
        "to": outcome.target.version,
        "sdist": {"file": outcome.target.sdist, "sha256": outcome.target.sha256},
        "stack": outcome.stack,
        "tests_of_a_fault": outcome.sample,
        "problem": outcome.problem or None,
        "exit_code": outcome.exit_code,
        "patches": [_patch(one) for one in outcome.judged],
        "others": [_other(one) for one in outcome.others],
    }


def write(house: House, outcome: Outcome) -> list[Path]:
    """report.json and report.md in dist/bump/<upstream>-<from>-<to>/, each whole or not at all."""
    content = document(outcome)
    if wrong := fault_in(content, "bump"):
        raise CarryError(f"the report of {outcome.name} would be malformed at {wrong}")
    folder = house.dist / "bump" / outcome.name
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"report.json": json.dumps(content, indent=1, sort_keys=True) + "\n", "report.md": markdown(house, outcome)}
    for name, text in texts.items():
        beside = folder / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, folder / name)
    return [folder / name for name in texts]


def table(outcome: Outcome) -> str:
    """Patch by patch, aligned for a terminal, each with its reason, then the other faults."""
    head = ("verdict", "fault", "text", "pristine", "patched")
    rows = [(j.verdict.name, j.patch.fault, "; ".join(j.signals.words), *_sides(j.behaviour)) for j in outcome.judged]
    rows += [(f"({o.standing})", o.fault, "-", *_sides(o.behaviour)) for o in outcome.others]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    lines += [f"{j.verdict.name}: {j.patch.fault}: {j.verdict.reason}" for j in outcome.judged]
    return "\n".join([*lines, headline(outcome)])


def headline(outcome: Outcome) -> str:
    counts = [f"{n} {name}" for name in ("carry", "rebase", "drop", "fix", "undecided") if (n := _count(outcome, name))]
    anew = [other.fault for other in outcome.others if other.standing == ANEW]
    counts += [f"new in it: {', '.join(anew)}"] if anew else []
    said = f"{outcome.pin} -> {outcome.target.version}: {', '.join(counts) or 'no patches'}"
    return f"{said} (exit {outcome.exit_code}: {outcome.problem or _MEANING[outcome.exit_code]})"


def markdown(house: House, outcome: Outcome) -> str:
    """The report as a comment for a pull request."""
    lines = [
        f"### {headline(outcome)}",
        "",
        f"`{outcome.target.sdist}` sha256 `{outcome.target.sha256}`, "
        + (f"tested in `{outcome.stack}`." if outcome.stack else "not tested."),
        "",
        "| verdict | fault | text | pristine | patched |",
        "|---|---|---|---|---|",
    ]
    for one in outcome.judged:
        words = _cell("; ".join(one.signals.words))
        before, after = _sides(one.behaviour)
        lines.append(f"| **{one.verdict.name}** | `{one.patch.fault}` | {words} | {before} | {after} |")
    for other in outcome.others:
        before, after = _sides(other.behaviour)
        lines.append(f"| {other.standing} | `{other.fault}` | not in the series | {before} | {after} |")
    lines.append("")
    lines += [f"- `{one.patch.fault}`: {_cell(one.verdict.reason)}" for one in outcome.judged]
    for other in outcome.others:
        if other.standing in (ANEW, SHARED):
            what = "new in this release" if other.standing == ANEW else f"in {outcome.pin.version} too"
            lines.append(f"- `{other.fault}`: {what}; a patch is in `{house.relative(other.patch.path)}`")
    for one in outcome.judged:
        if one.verdict.name == FIX and one.signals.conflict:
            at = one.signals.conflict
            shown = f"{house.relative(one.patch.path)}:{at.patch_line}"
            fence = "`" * max(3, _longest_ticks(at.hunk) + 1)
            lines += ["", f"<details><summary>{shown} against {at.file}:{at.near_line}</summary>", ""]
            lines += [f"{fence}diff", at.hunk, fence, "", "</details>"]
    return "\n".join(lines) + "\n"


def annotations(house: House, outcome: Outcome) -> list[str]:
    """Workflow commands of GitHub Actions, one for each patch that a person has to look at, at its file and line."""
    found = []
    for one in outcome.judged:
        if one.verdict.name == CARRY:
            continue
        at = one.signals.conflict
        level = "error" if one.verdict.name == FIX else "warning"
        title = f"{one.verdict.name} in {outcome.target.version}: {one.patch.fault}"
        line = at.patch_line if at and one.verdict.name == FIX else _fault_line(one)
        found.append(annotation(level, house.relative(one.patch.path), line, title, one.verdict.reason))
    for other in outcome.others:
        if other.standing == ANEW:
            title = f"new in {outcome.target.version}: {other.fault}"
            text = f"{outcome.pin} has it not; this patch is the nearest"
            found.append(annotation("warning", house.relative(other.patch.path), 1, title, text))
    return found


def _fault_line(one: Judged) -> int:
    return next((trailer.line for trailer in one.patch.trailers if trailer.key == "Fault"), 1)


def _patch(one: Judged) -> dict:
    signals, conflict = one.signals, one.signals.conflict
    return {
        "file": one.patch.path.name,
        "fault": one.patch.fault,
        "verdict": one.verdict.name,
        "reason": one.verdict.reason,
        "signals": {
            "text": signals.text,
            "reverse_applies": signals.reverse_applies,
            "empty_after_three_way": signals.empty,
            "symbols_gone": list(map(str, signals.gone)),
            "symbols_uncalled": list(map(str, signals.uncalled)),
            "conflict": conflict and {
                "patch_line": conflict.patch_line,
                "file": conflict.file,
                "near_line": conflict.near_line,
                "hunk": conflict.hunk,
            },
        },
        **_behaviour(one.behaviour),
    }  # fmt: skip


def _other(one: Other) -> dict:
    pin = one.patch.path.parent.name
    return {"fault": one.fault, "standing": one.standing, "patch": f"{pin}/{one.patch.path.name}"} | _behaviour(
        one.behaviour
    )


def _behaviour(seen: Behaviour) -> dict:
    return {"pristine": list(map(_run, seen.pristine)), "patched": list(map(_run, seen.patched))}


def _run(run: Run) -> Mapping:
    return {
        name: {"outcome": test["outcome"], "symptom": test.get("symptom"), "message": test.get("message")}
        for name, test in run.items()
    }


def _sides(seen: Behaviour) -> tuple[str, str]:
    return counted(seen.pristine), counted(seen.patched)


def _count(outcome: Outcome, name: str) -> int:
    return sum(one.verdict.name == name for one in outcome.judged)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _longest_ticks(text: str) -> int:
    longest = run = 0
    for sign in text:
        run = run + 1 if sign == "`" else 0
        longest = max(longest, run)
    return longest
