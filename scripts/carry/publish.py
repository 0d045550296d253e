"""Promotion of proven wheels, the very bytes that were proven, from the candidate index to `dist/simple/`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from carry.errors import UserError
from carry.index import read_index, write_index
from carry.paths import House
from carry.pins import Pin
from carry.schema import fault_in
from carry.wheelcheck import Wheel, read_wheel


class Published(NamedTuple):
    """File names: `added` by this run, `kept` from earlier ones."""

    added: tuple[str, ...]
    kept: tuple[str, ...]


class Refused(UserError):
    """Wheels that may not be published: `reasons` holds one line for each."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n".join(self.reasons))


def publish(house: House, pins: Iterable[Pin]) -> Published:
    """Add the patched wheel of every pin to `dist/simple/`, which keeps all that it already holds.

    Each wheel needs, for every stack of its pin, a proof that says proven and names the wheel's sha256.
    All or nothing: raises Refused, and publishes nothing, where any wheel has no such proof, was not built,
    or has the name of a published wheel and other bytes. Raises what `write_index` raises.
    """
    published = read_index(house.simple)
    candidates = list(_candidates(house.candidate))
    reasons, added = [], {}
    for wheel in published.values():
        if wheel.provenance.get("flavour") == "pristine":
            reasons.append(f"{wheel.file}: pristine, yet published; delete {house.relative(house.simple)}")
    for pin in pins:
        try:
            wheel = _candidate(pin, candidates)
            _check_unchanged(pin, wheel, published)
            for stack in pin.stacks:
                _check_proof(house, pin, wheel, stack)
        except UserError as refusal:
            reasons.append(str(refusal))
        else:
            added[wheel.file] = wheel
    if reasons:
        raise Refused(reasons)
    write_index([wheel.path for wheel in {**added, **published}.values()], house.simple)
    return Published(tuple(sorted(added.keys() - published.keys())), tuple(sorted(published)))


def _candidates(folder: Path) -> Iterable[Wheel]:
    return (wheel for path in sorted(folder.glob("*/*.whl")) if (wheel := read_wheel(path)).carry)


def _candidate(pin: Pin, candidates: Iterable[Wheel]) -> Wheel:
    wanted = {
        "upstream": pin.upstream.name,
        "version": pin.version,
        "flavour": "patched",
        "revision": pin.revision,
        "variant": "pure",
    }
    for wheel in candidates:
        if all(wheel.provenance.get(key) == value for key, value in wanted.items()):
            return wheel
    raise UserError(f"{pin} revision {pin.revision}: not built; run `{_make('build-wheels', pin)}`")


def _check_unchanged(pin: Pin, wheel: Wheel, published: dict[str, Wheel]) -> None:
    old = published.get(wheel.file)
    if old and old.sha256 != wheel.sha256:
        raise UserError(
            f"{wheel.file}: published with sha256 {old.sha256[:12]}…, the new build has {wheel.sha256[:12]}…;"
            f" raise the revision in patches/{pin.upstream.name}/{pin.version}/pin.toml"
            f" and run `{_make('build-wheels', pin)}`"
        )


def _check_proof(house: House, pin: Pin, wheel: Wheel, stack: str) -> None:
    path = house.proofs / wheel.file.removesuffix(".whl") / f"{stack}.json"
    command = f"run `{_make('prove', pin)}`"
    where = f"{wheel.file}: proof {house.relative(path)}"
    try:
        proof = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{wheel.file}: no proof {house.relative(path)}; {command}") from None
    except ValueError:
        raise UserError(f"{where} is not JSON; {command}") from None
    if fault := fault_in(proof, "proof"):
        raise UserError(f"{where} is malformed at {fault}; {command}")
    if proof["wheel"]["sha256"] != wheel.sha256 or proof["stack"]["name"] != stack:
        raise UserError(f"{where} is of another wheel or stack ({proof['wheel']['sha256'][:12]}…); {command}")
    if proof["verdict"] != "proven":
        raise UserError(f"{where} is red: {_first_red(proof)}; mend the patch or the test, then {command}")
    if unproven := set(wheel.provenance["faults"]) - set(proof["faults"]):
        raise UserError(f"{where} says nothing of {', '.join(sorted(unproven))}; {command}")


def _first_red(proof: dict) -> str:
    wanted = [
        (f"{name}: ", test, {"pristine": "red", "patched": "green"})
        for name, fault in proof["faults"].items()
        for test in fault["tests"]
    ] + [("guard ", test, {"pristine": "green", "patched": "green"}) for test in proof["guards"]]
    for prefix, test, outcomes in wanted:
        for flavour, outcome in outcomes.items():
            if test[flavour]["outcome"] != outcome:
                return f"{prefix}{test['id']} is {test[flavour]['outcome']} on {flavour}, not {outcome}"
    untested = [name for name, fault in proof["faults"].items() if not fault["tests"]]
    return f"{untested[0]} has no test" if untested else "it says unproven"


def _make(target: str, pin: Pin) -> str:
    return f"make {target} UPSTREAM={pin.upstream.name} VERSION={pin.version}"
