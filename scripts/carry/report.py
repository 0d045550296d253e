"""What the proofs say, for people: a table on the terminal, and the one in the README."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from carry.errors import UserError
from carry.patches import load_series
from carry.paths import House
from carry.pins import Pin, all_pins
from carry.proofs import out_of_date
from carry.schema import fault_in
from carry.wheels import wheel_name

BEGIN, END = "<!-- status: made by `make record` -->", "<!-- end of status -->"


def rows(document: dict) -> list[tuple[str, str, str, str, str]]:
    """(fault, pin, stack, pristine, patched) for every fault of a proof, and one row for its guards."""
    pin = f"{document['upstream']} {document['version']}"
    stack = document["stack"]["name"]
    found = [
        (fault, pin, stack, _pristine(entry["tests"]), _green(entry["tests"], "patched"))
        for fault, entry in document["faults"].items()
    ]
    if document["guards"]:
        sides = [_green(document["guards"], side) for side in ("pristine", "patched")]
        found.append(("(guards: right before, right after)", pin, stack, *sides))
    return found


def table(documents: Iterable[dict]) -> str:
    """Fault by pin, red as expected on pristine and green on patched, aligned for a terminal."""
    head = ("fault", "pin", "stack", "pristine", "patched")
    body = [row for document in documents for row in rows(document)]
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *body))


def failures(documents: Iterable[dict]) -> list[str]:
    """Every outcome that is not as expected, one line each."""
    found = []
    for document in documents:
        pin = f"{document['upstream']} {document['version']}"
        for fault, entry in document["faults"].items():
            if not entry["tests"]:
                found.append(f"{pin}: {fault} has no test")
            found += _unexpected(pin, fault, entry["tests"], "red")
        found += _unexpected(pin, "guard", document["guards"], "green")
    return found


def proven_here(house: House) -> list[dict]:
    """This machine's proofs of the current wheels of every pin, whatever they say."""
    found = []
    for pin in all_pins(house):
        for stack in pin.stacks:
            with contextlib.suppress(FileNotFoundError, ValueError):
                found.append(json.loads(_proof_path(house, pin, stack).read_bytes()))
    return found


def _proof_path(house: House, pin: Pin, stack: str) -> Path:
    return house.proofs / wheel_name(pin, "patched").removesuffix(".whl") / f"{stack}.json"


def recorded(house: House, pin: Pin) -> dict | None:
    """The proof committed with the series, or None. Raises UserError where it is malformed."""
    return _read(house, pin.folder / "proof.json", "record it again with `make record`")


def check_current(house: House, pins: Iterable[Pin]) -> None:
    """Raise UserError where a proof of this machine no longer speaks of the series, the tests or the stack here."""
    for pin in pins:
        for stack in pin.stacks:
            again = f"run `make prove UPSTREAM={pin.upstream.name} VERSION={pin.version}`"
            path = _proof_path(house, pin, stack)
            proof = _read(house, path, again)
            if proof and (reason := out_of_date(house, pin, proof)):
                raise UserError(f"{pin}: {house.relative(path)} is stale: {reason}; {again}")


def _read(house: House, path: Path, again: str) -> dict | None:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{house.relative(path)}:1: not JSON; {again}") from None
    wrong = fault_in(document, "proof")
    if wrong:
        raise UserError(f"{house.relative(path)}:1: malformed at {wrong}; {again}")
    return document


def record(house: House, pins: Sequence[Pin]) -> list[Path]:
    """Copy this machine's proofs into patches/, without durations, and render the README's table.

    Raises UserError where a proof is missing, unproven, or of another series; nothing is written then.
    """
    fresh = {}
    for pin in pins:
        series = load_series(pin)
        if not series:
            continue
        path = _proof_path(house, pin, pin.stacks[0])
        again = f"run `make prove UPSTREAM={pin.upstream.name} VERSION={pin.version}`"
        document = _read(house, path, again)
        if document is None:
            raise UserError(f"{pin}: no proof {house.relative(path)}; {again}")
        if reason := out_of_date(house, pin, document):
            raise UserError(f"{pin}: {house.relative(path)} is stale: {reason}; {again}")
        if document["verdict"] != "proven":
            raise UserError(f"{pin}: {house.relative(path)} says unproven; mend the patch or its test, then {again}")
        fresh[pin.folder / "proof.json"] = _stable(document)
    written = [path for path, text in fresh.items() if replace_text(path, text)]
    readme = house.root / "README.md"
    if replace_text(readme, with_status(readme.read_text(encoding="utf-8"), house)):
        written.append(readme)
    return written


def with_status(readme: str, house: House) -> str:
    """The README's text with the table between its marks made anew from the committed proofs."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"README.md: no {BEGIN} … {END}; put the two marks where the table belongs")
    documents = [document for pin in all_pins(house) if (document := recorded(house, pin))]
    return f"{before}{begin}\n{markdown(documents)}\n{end}{after}"


def markdown(documents: Sequence[dict]) -> str:
    """The status table in Markdown; a fault's cell counts its tests."""
    lines = ["| fault | pin | pristine | patched | stack |", "|---|---|---|---|---|"]
    for document in documents:
        for fault, pin, stack, pristine, patched in rows(document):
            shown = fault if fault.startswith("(") else f"`{fault}`"
            lines.append(f"| {shown} | {pin} | {pristine} | {patched} | {stack}, torch {document['stack']['torch']} |")
    return "\n".join(lines)


def _pristine(tests: Sequence[dict]) -> str:
    red = [test for test in tests if test["pristine"]["outcome"] == "red"]
    symptoms = sorted({test["pristine"]["symptom"] for test in red})
    return f"red {len(red)}/{len(tests)}" + (f" ({', '.join(symptoms)})" if symptoms else "")


def _green(tests: Sequence[dict], side: str) -> str:
    return f"green {sum(test[side]['outcome'] == 'green' for test in tests)}/{len(tests)}"


def _unexpected(pin: str, what: str, tests: Sequence[dict], pristine: str) -> list[str]:
    return [
        f"{pin}: {what}: {test['id'].rpartition('/')[2]} is {test[side]['outcome']} on {side}, not {want}"
        f" ({test[side]['symptom'] or '-'}: {' '.join((test[side]['message'] or '').split())[:160]})"
        for test in tests
        for side, want in (("pristine", pristine), ("patched", "green"))
        if test[side]["outcome"] != want
    ]


def _stable(document: dict) -> str:
    """The proof without what differs from run to run: durations, and addresses or times in messages."""

    def side(outcome: dict) -> dict:
        return {"outcome": outcome["outcome"], "symptom": outcome["symptom"]}

    def tests(found: Sequence[dict]) -> list[dict]:
        return [{"id": t["id"], "pristine": side(t["pristine"]), "patched": side(t["patched"])} for t in found]

    kept = {key: value for key, value in document.items() if key != "duration_s"}
    kept["faults"] = {k: {**v, "tests": tests(v["tests"])} for k, v in document["faults"].items()}
    kept["guards"] = tests(document["guards"])
    return json.dumps(kept, indent=1, sort_keys=True) + "\n"


def replace_text(path: Path, text: str) -> bool:
    """Write `text` to `path` whole or not at all; False where it has that text already."""
    return replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> bool:
    """As `replace_text`."""
    if path.exists() and path.read_bytes() == data:
        return False
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(data)
    os.replace(beside, path)
    return True
