"""What the matrix found, committed: counts of the last whole run beside each series, and the README's table of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from carry.errors import UserError
from carry.matrix import read
from carry.paths import House
from carry.pins import Pin, all_pins
from carry.report import replace_text
from carry.wheels import FLAVOURS

BEGIN, END = "<!-- matrix: made by `make record` -->", "<!-- end of matrix -->"


def record(house: House) -> list[Path]:
    """Take the counts of whole runs from dist/matrix/ into patches/, and render the README's table; what changed.

    A flavour that was not run here keeps the counts it had. Raises UserError where a file of dist/matrix/ is malformed.
    """
    written = []
    for pin in all_pins(house):
        kept = recorded(pin)
        for flavour in FLAVOURS:
            path = house.matrices / f"{pin.upstream.name}-{pin.version}-{flavour}-{pin.stacks[0]}.json"
            if path.exists():
                document = read(path)
                if document["selection"] == "default":
                    kept[flavour] = _kept(document)
        if kept and replace_text(pin.folder / "matrix.json", json.dumps(kept, indent=1, sort_keys=True) + "\n"):
            written.append(pin.folder / "matrix.json")
    readme = house.root / "README.md"
    if replace_text(readme, with_table(readme.read_text(encoding="utf-8"), house)):
        written.append(readme)
    return written


def recorded(pin: Pin) -> dict:
    """Flavour -> counts of the last whole run that was recorded; empty where none was."""
    path = pin.folder / "matrix.json"
    return json.loads(path.read_bytes()) if path.exists() else {}


def with_table(readme: str, house: House) -> str:
    """The README's text with the table between its marks made anew from what is committed; as it is without marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin:
        return readme
    if not end:
        raise UserError(f"README.md: {BEGIN} and no {END}; put it where the table ends")
    return f"{before}{begin}\n{markdown(house)}\n{end}{after}"


def markdown(house: House) -> str:
    """Release by flavour: cells, pairs of values met, and how the cells ended."""
    lines = [
        "| release | wheel | cells | silent wrong | crash, hang | unclear error | clear error | resumed | run it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for pin in all_pins(house):
        lines += [_row(pin, flavour, kept) for flavour, kept in sorted(recorded(pin).items(), reverse=True)]
    return "\n".join(lines)


def _row(pin: Pin, flavour: str, kept: Mapping) -> str:
    counts = kept["counts"]

    def of(*names: str) -> int:
        return sum(counts.get(name, 0) for name in names)

    command = f"make matrix UPSTREAM={pin.upstream.name} VERSION={pin.version}"
    command += " FLAVOUR=pristine" if flavour == "pristine" else ""
    wheel = kept["wheel"].split("-")[1]
    shown = (
        str(pin), wheel, sum(counts.values()), of("silent-wrong"), of("crash", "hang", "broken"), of("unclear-error"),
        of("clear-error", "refused"), of("exact", "tolerance"), f"`{command}`",
    )  # fmt: skip
    return f"| {' | '.join(map(str, shown))} |"


def _kept(document: Mapping) -> dict:
    return {
        "wheel": document["wheel"]["file"],
        "sha256": document["wheel"]["sha256"],
        "stack": document["stack"],
        "coverage": document["coverage"],
        "counts": document["counts"],
    }
