"""What a replay found: two curves per fault on the terminal, a JSON document, and a page."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from carry.errors import CarryError, CouldNotRun, ReviewNeeded
from carry.paths import House
from carry.replay import Point, Replay, Score, scores
from carry.schema import fault_in
from carry.signals import APPLIES, CONFLICT, GONE, OFFSET, THREE_WAY
from carry.verdicts import counted

_TEXT = {APPLIES: "=", OFFSET: "~", THREE_WAY: "3", CONFLICT: "x", GONE: "o"}
_NEEDED = {True: "#", False: ".", None: "?"}
_GREEN, _PALE, _YELLOW, _RED, _GREY, _BLUE = "#2a7", "#5b9", "#db3", "#c44", "#888", "#57c"
_COLOURS = {"=": _GREEN, "~": _PALE, "3": _YELLOW, "x": _RED, "o": _GREY, "i": _BLUE}
_COLOURS |= {"#": _RED, ".": _GREEN, "?": _YELLOW}


def document(found: Replay) -> dict:
    """The JSON of schemas/replay.schema.json."""
    return {
        "schema": 1,
        "upstream": found.upstream,
        "from": found.versions[0],
        "to": found.versions[-1],
        "tests_of_a_fault": found.sample,
        "releases": [
            {"version": v, "stack": found.stacks.get(v), "problem": found.problems.get(v)} for v in found.versions
        ],
        "faults": {fault: [_point(found.at(fault, version)) for version in found.versions] for fault in found.faults},
        "scores": [
            {**asdict(score), "precision": score.precision, "recall": score.recall} for score in scores(found.points)
        ],
        "affects": [
            {
                "patch": f"{claim.patch.path.parent.name}/{claim.patch.path.name}",
                "fault": claim.patch.fault,
                "wrong_in": list(claim.wrong),
                "should_be": list(claim.measured),
            }
            for claim in found.claims
        ],
    }


def write(house: House, found: Replay) -> list[Path]:
    """dist/replay/<upstream>.json and .html, each whole or not at all."""
    content = document(found)
    if wrong := fault_in(content, "replay"):
        raise CarryError(f"the replay of {found.upstream} would be malformed at {wrong}")
    folder = house.dist / "replay"
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        f"{found.upstream}.json": json.dumps(content, indent=1, sort_keys=True) + "\n",
        f"{found.upstream}.html": page(found),
    }
    for name, text in texts.items():
        beside = folder / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, folder / name)
    return [folder / name for name in texts]


def exit_code(found: Replay, corrected: bool) -> int:
    """13 where a release that was asked for could not be run, 10 where an Affects trailer is wrong and stays so."""
    if found.problems:
        return CouldNotRun.exit_code
    return ReviewNeeded.exit_code if any(claim.wrong for claim in found.claims) and not corrected else 0


def text(found: Replay) -> str:
    """Per fault a line of what applies and one of what is needed, a sign a release; then signals and trailers."""
    width = max(map(len, found.faults))
    lines = [
        f"{found.upstream} {found.versions[0]} -> {found.versions[-1]}: {len(found.versions)} releases, "
        f"{len(found.stacks)} with behaviour",
        "applies: = as it is, ~ with an offset, 3 three-way, x conflict, o file gone, i in already by its text",
        "needed:  # the fault is there, . it is not, ? its tests do not tell, blank not run",
    ]
    for fault in found.faults:
        points = [found.at(fault, version) for version in found.versions]
        lines.append(f"{fault.ljust(width)}  applies  {''.join(map(_applies, points))}")
        lines.append(f"{''.ljust(width)}  needed   {''.join(map(_is_needed, points))}".rstrip())
    lines += ["", *_score_lines(found), "", *_claim_lines(found)]
    lines += [f"not run: {version}: {why}" for version, why in found.problems.items()]
    return "\n".join(lines)


def page(found: Replay) -> str:
    """One HTML file with nothing around it: the curves as coloured cells, each with its evidence as a tooltip."""
    title = html.escape(f"{found.upstream} {found.versions[0]} to {found.versions[-1]}")
    head = "".join(f"<th><span>{html.escape(version)}</span></th>" for version in found.versions)
    rows = []
    for fault in found.faults:
        points = [found.at(fault, version) for version in found.versions]
        for name, sign in (("applies", _applies), ("needed", _is_needed)):
            label = f'<th rowspan="2">{html.escape(fault)}</th>' if name == "applies" else ""
            cells = "".join(_cell(point, sign(point)) for point in points)
            rows.append(f"<tr>{label}<td>{name}</td>{cells}</tr>")
    notes = "\n".join(html.escape(line) for line in [*_score_lines(found), "", *_claim_lines(found)])
    return f"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px sans-serif}}td,th{{padding:1px 3px;text-align:center}}th span{{writing-mode:vertical-rl}}</style>
<h1>{title}</h1>
<p>applies: = as it is, ~ offset, 3 three-way, x conflict, o file gone, i in already by its text.
needed: # the fault is there, . it is not, ? its tests do not tell, empty not run.</p>
<table><tr><th>fault</th><th></th>{head}</tr>
{chr(10).join(rows)}
</table>
<pre>{notes}</pre></html>
"""


def _cell(point: Point, sign: str) -> str:
    said = "; ".join(point.signals.words) + (f" | {counted((point.run,))}" if point.run else "")
    colour = f' style="background:{_COLOURS[sign]}"' if sign in _COLOURS else ""
    return f'<td{colour} title="{html.escape(f"{point.version}: {said}", quote=True)}">{html.escape(sign)}</td>'


def _applies(point: Point) -> str:
    return "i" if point.signals.in_already else _TEXT[point.signals.text]


def _is_needed(point: Point) -> str:
    return _NEEDED[point.needed] if point.run else " "


def _score_lines(found: Replay) -> Iterator[str]:
    rated = scores(found.points)
    total = sum(point.needed is not None for point in found.points)
    yield f"each text signal against behaviour, {total} points"
    width = max(len(score.claim) for score in rated)
    yield f"{'signal: claim'.ljust(width)}  precision  recall"
    for score in rated:
        yield f"{score.claim.ljust(width)}  {_rate(score, 'precision', 'claimed')}  {_rate(score, 'recall', 'true')}"


def _rate(score: Score, name: str, of: str) -> str:
    value = getattr(score, name)
    return "        -" if value is None else f"{value:5.2f} ({score.right}/{getattr(score, of)})"


def _claim_lines(found: Replay) -> Iterator[str]:
    wrong = [claim for claim in found.claims if claim.wrong]
    if not wrong:
        yield "Affects: nothing that was run contradicts a trailer"
    for claim in wrong:
        name = f"{claim.patch.path.parent.name}/{claim.patch.path.name}"
        yield (
            f"Affects of {name} is wrong in {', '.join(claim.wrong)}; it should be "
            f"{' and '.join(claim.measured) or 'nothing: drop the patch'}"
        )


def _point(point: Point) -> dict:
    signals = point.signals
    return {
        "version": point.version,
        "patch": f"{signals.patch.path.parent.name}/{signals.patch.path.name}",
        "applies": signals.text,
        "reverse_applies": signals.reverse_applies,
        "empty_after_three_way": signals.empty,
        "symbols_gone": list(map(str, signals.gone)),
        "symbols_uncalled": list(map(str, signals.uncalled)),
        "needed": point.needed,
        "tests": {name: test["outcome"] for name, test in (point.run or {}).items()},
    }
