"""What a patched load costs against the pristine one: time, bytes read and memory, in rounds that take turns."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carry.envs import install_stack, site
from carry.errors import CouldNotRun
from carry.instack import call
from carry.paths import House
from carry.pins import Pin
from carry.progress import say
from carry.report import replace_text
from carry.wheels import FLAVOURS, Wheel

# what may be more by how much: bytes and memory are the same from run to run but for a page or two, time is not
GOALS = {"wall_s": 1.25, "cpu_s": 1.1, "bytes_read": 1.01, "peak_bytes": 1.05}
ROUNDS = 5
_LIMIT_S = 15 * 60


@dataclass(frozen=True)
class Load:
    """One load: flavour -> measure -> its value in every round, the worst rank's."""

    name: str
    rounds: Mapping[str, Mapping[str, Sequence[float]]]

    def median(self, flavour: str, of: str) -> float:
        return statistics.median(self.rounds[flavour][of])

    def ratio(self, of: str) -> float:
        return self.median("patched", of) / max(self.median("pristine", of), 1e-9)

    @property
    def met(self) -> bool:
        return all(self.ratio(of) <= most for of, most in GOALS.items())


def measure(house: House, pin: Pin, wheels: Sequence[Wheel], rounds: int) -> list[Load]:
    """Loads of checkpoints that the pristine release saved, by both wheels of `pin` in its first stack, and writes
    dist/bench/load-<pin>.json.

    Raises CouldNotRun where a load fails: only loads that work on the pristine release are measured.
    """
    env = install_stack(house, pin.stacks[0])
    built = {wheel.flavour: wheel for wheel in wheels if str(wheel.pin) == str(pin)}
    folders = {flavour: site(house, env, built[flavour].path.name, built[flavour].sha256) for flavour in FLAVOURS}
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="carry-loads-") as scratch:

        def run(what: str, flavour: str) -> list[dict]:
            name = f"bench-load-{pin.upstream.name}-{pin.version}-{flavour}"
            command = [str(env.python), "-W", "ignore", "-m", "matrix.loads", what, scratch]
            if call(house, command, [folders[flavour], house.tests], name, _LIMIT_S, quiet=True):
                raise CouldNotRun(f"{pin} {flavour}: a load to measure failed; see build/logs/{name}.log")
            text = (house.build / "logs" / f"{name}.log").read_text(errors="replace")
            return [json.loads(line) for line in re.findall(r"^LOAD (\{.*\})$", text, re.MULTILINE)]

        say(f"bench: saving with the pristine {pin}")
        run("save", "pristine")
        for number in range(1, rounds + 1):
            say(f"bench: loading with both wheels of {pin}, round {number} of {rounds}")
            for flavour in FLAVOURS:
                for one in run("load", flavour):
                    values = found.setdefault(one.pop("load"), {}).setdefault(flavour, {})
                    for of, value in one.items():
                        values.setdefault(of, []).append(value)
    loads = [Load(name, rounds) for name, rounds in found.items()]
    _write(house, pin, loads)
    return loads


def _write(house: House, pin: Pin, loads: Sequence[Load]) -> Path:
    document = {
        "schema": 1,
        "pin": str(pin),
        "goals": GOALS,
        "loads": [
            {"load": one.name, "met": one.met, "ratio": {of: one.ratio(of) for of in GOALS}, "rounds": one.rounds}
            for one in loads
        ],
    }
    path = house.dist / "bench" / f"load-{pin.upstream.name}-{pin.version}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(document, indent=1) + "\n")
    return path


def table(pin: Pin, loads: Sequence[Load]) -> str:
    """Per load the patched wheel's medians and their ratios to the pristine one's."""
    rows = [(f"{pin}, patched", "clock", "", "processor", "", "read", "", "memory", "", "")]
    for one in loads:
        shown = [one.name]
        for of, unit, scale in (
            ("wall_s", "s", 1),
            ("cpu_s", "s", 1),
            ("bytes_read", "MB", 1e6),
            ("peak_bytes", "MB", 1e6),
        ):
            shown += [f"{one.median('patched', of) / scale:.2f} {unit}", f"{one.ratio(of):.2f}"]
        rows.append((*shown, "met" if one.met else "MISSED"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    goals = ", ".join(f"{of} {most:g}" for of, most in GOALS.items())
    return "\n".join([*lines, f"Medians of the worst rank, and ratios to the pristine wheel; at most {goals}."])
