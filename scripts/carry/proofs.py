"""Proofs: the tests of a series on the pristine and on the patched wheel, in one stack, and what came of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from carry.envs import Env, install_stack, site
from carry.errors import CarryError, CouldNotRun, UserError
from carry.patches import Patch, load_series, series_sha256
from carry.paths import House
from carry.pins import Pin
from carry.progress import say
from carry.schema import fault_in
from carry.wheels import FLAVOURS, Wheel

_OUTCOME = ("outcome", "symptom", "message", "duration_s")
# A test run that hangs in spite of the tests' own time limits.
_LIMIT_S = 45 * 60


@dataclass(frozen=True)
class Result:
    """One pin in one stack: the proof document, and where it was written (None: a part was run)."""

    pin: Pin
    document: dict
    path: Path | None

    @property
    def proven(self) -> bool:
        return self.document["verdict"] == "proven"


def prove(house: House, pins: Iterable[Pin], wheels: Iterable[Wheel], fault: str | None = None) -> list[Result]:
    """Run every pin's tests on both flavours in each of its stacks.

    `fault` narrows the run to one fault's tests; nothing is written then.
    Raises UserError for a pin without patches or a fault that no series has, and as `install_stack` and `site`.
    """
    built = {(str(wheel.pin), wheel.flavour): wheel for wheel in wheels}
    chosen = [(pin, series) for pin in pins if (series := load_series(pin))]
    if fault:
        known = sorted({patch.fault for _, series in chosen for patch in series})
        chosen = [(pin, series) for pin, series in chosen if fault in {patch.fault for patch in series}]
        if not chosen:
            raise UserError(f"no fault {fault!r} in the series asked for; there is: {', '.join(known) or 'none'}")
    if not chosen:
        raise UserError("nothing to prove: no pin asked for has patches; write one with `make apply`")
    results = []
    for pin, series in chosen:
        for name in pin.stacks:
            env = install_stack(house, name)
            document = _prove(house, pin, series, env, {f: built[str(pin), f] for f in FLAVOURS}, fault)
            results.append(Result(pin, document, None if fault else _write(house, document)))
    return results


def tests_sha256(house: House, upstream: str) -> str:
    """Hash of every test file that a proof of `upstream` runs."""
    digest = hashlib.sha256()
    root = house.tests / "resume"
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if len(inner.parts) == 1 or inner.parts[0] in (upstream, "standin"):
            digest.update(f"{inner}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _prove(
    house: House, pin: Pin, series: tuple[Patch, ...], env: Env, wheels: dict[str, Wheel], fault: str | None
) -> dict:
    started = time.monotonic()
    reports = {
        flavour: _run(house, pin, env, wheels[flavour], [fault] if fault else [p.fault for p in series], fault)
        for flavour in ("pristine", "patched")
    }
    faults = {
        patch.fault: {"patch": patch.path.name, **_fault(reports, patch.fault)}
        for patch in series
        if fault in (None, patch.fault)
    }
    guards = _pairs(reports, None)
    good = all(entry["verdict"] == "proven" for entry in faults.values()) and all(
        guard[flavour]["outcome"] == "green" for guard in guards for flavour in FLAVOURS
    )
    return {
        "schema": 1,
        "upstream": pin.upstream.name,
        "version": pin.version,
        "revision": pin.revision,
        "stack": {
            "name": env.stack.name,
            "sha256": env.stack.sha256,
            "python": env.python_version,
            "torch": env.torch,
        },
        "wheel": {"file": wheels["patched"].path.name, "sha256": wheels["patched"].sha256},
        "pristine": {"file": wheels["pristine"].path.name, "sha256": wheels["pristine"].sha256},
        "series_sha256": series_sha256(series),
        "tests_sha256": tests_sha256(house, pin.upstream.name),
        "lane": "cpu",
        "duration_s": round(time.monotonic() - started, 1),
        "faults": faults,
        "guards": guards,
        "verdict": "proven" if good and faults else "unproven",
    }


def _fault(reports: dict[str, dict], fault: str) -> dict:
    tests = _pairs(reports, fault)
    good = bool(tests) and all(
        test["pristine"]["outcome"] == "red" and test["patched"]["outcome"] == "green" for test in tests
    )
    return {"verdict": "proven" if good else "unproven", "tests": tests}


def _pairs(reports: dict[str, dict], fault: str | None) -> list[dict]:
    """Tests of `fault` (None: of no fault) with their outcome on each flavour; one that did not run is an error."""
    missing = {"outcome": "error", "symptom": None, "message": "did not run"}
    ids = sorted({i for report in reports.values() for i, out in report.items() if out["fault"] == fault})
    return [
        {
            "id": name,
            **{
                flavour: {k: v for k, v in reports[flavour].get(name, missing).items() if k in _OUTCOME}
                for flavour in ("pristine", "patched")
            },
        }
        for name in ids
    ]


def _run(house: House, pin: Pin, env: Env, wheel: Wheel, faults: list[str], only: str | None) -> dict:
    folder = site(house, env, wheel.path.name, wheel.sha256)
    say(f"testing {wheel.path.name} in {env.stack.name}")
    others = [p.parent for p in (house.tests / "resume").glob("*/__init__.py")]
    ignored = [p for p in others if p.name not in (pin.upstream.name, "standin")]
    with tempfile.TemporaryDirectory(prefix="carry-prove-") as scratch:
        report = Path(scratch) / "report.json"
        command = [
            str(env.python), "-m", "pytest", str(house.tests / "resume"), "-q", "-n", "2", "--dist", "worksteal",
            "-p", "no:cacheprovider", "--tb=short", "--basetemp", str(Path(scratch) / "tmp"),
            "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning", "-W", "ignore::UserWarning",
            f"--carry-upstream={pin.upstream.name}", f"--carry-faults={','.join(faults)}",
            f"--carry-report={report}", *(["--carry-only"] if only else []),
            *(f"--ignore={path}" for path in ignored),
        ]  # fmt: skip
        code = _call(house, command, folder, f"prove-{wheel.path.name.removesuffix('.whl')}-{env.stack.name}")
        try:
            document = json.loads(report.read_bytes())
        except FileNotFoundError:
            log = f"build/logs/prove-{wheel.path.name.removesuffix('.whl')}-{env.stack.name}.log"
            raise CouldNotRun(f"pytest ended with code {code} before any test; see {log}") from None
    return document["outcomes"]


def _call(house: House, command: list[str], folder: Path, name: str) -> int:
    """Run pytest with its progress on the terminal, and all of its output in build/logs/<name>.log."""
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON", "CARRY_"))},
        "PYTHONPATH": f"{folder}{os.pathsep}{house.tests}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    log = house.build / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LIMIT_S
    with open(log, "wb") as handle, subprocess.Popen(
        command, cwd=house.root, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            for line in process.stdout:
                handle.write(line)
                say(line.decode(errors="replace").rstrip("\n"))
                if time.monotonic() > deadline:
                    raise CouldNotRun(f"the tests took more than {_LIMIT_S // 60} minutes; see {log}")
            return process.wait()
        finally:
            # the ranks belong to pytest's own session: ^C or a failure here must not leave them running
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)


def _write(house: House, document: dict) -> Path:
    wrong = fault_in(document, "proof")
    if wrong:
        raise CarryError(f"the proof would be malformed at {wrong}")
    name = document["wheel"]["file"].removesuffix(".whl")
    path = house.proofs / name / f"{document['stack']['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".json.new")
    beside.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(beside, path)
    return path
