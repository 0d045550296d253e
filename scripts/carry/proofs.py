"""Proofs: the tests of a series on the pristine and on the patched wheel, in one stack, and what came of them."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from carry.envs import Env, install_stack, load_stack, site
from carry.errors import CouldNotRun, UserError
from carry.instack import call
from carry.patches import Patch, load_series, series_sha256
from carry.paths import House
from carry.pins import Pin
from carry.progress import say
from carry.schema import write_document
from carry.wheels import FLAVOURS, Wheel

_OUTCOME = ("outcome", "symptom", "message", "duration_s")
# A test run that hangs in spite of the tests' own time limits.
_LIMIT_S = 45 * 60
_NO_TESTS = 5  # pytest's exit code


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


def out_of_date(house: House, pin: Pin, proof: dict) -> str | None:
    """Why `proof` no more speaks of what is here: its series, revision, tests or stack changed; None where it does."""
    wanted = {
        "series": (proof["series_sha256"], series_sha256(load_series(pin))),
        "revision": (proof["revision"], pin.revision),
        "tests": (proof["tests_sha256"], tests_sha256(house, pin.upstream.name)),
        "stack": (proof["stack"]["sha256"], load_stack(house, proof["stack"]["name"]).sha256),
    }
    changed = [what for what, (then, now) in wanted.items() if then != now]
    return f"the {' and the '.join(changed)} changed since" if changed else None


def _prove(
    house: House, pin: Pin, series: tuple[Patch, ...], env: Env, wheels: dict[str, Wheel], fault: str | None
) -> dict:
    started, tests = time.monotonic(), tests_sha256(house, pin.upstream.name)
    reports = {
        flavour: run_tests(
            house, env, wheels[flavour], [fault] if fault else [p.fault for p in series], guards=not fault
        )
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
        "tests_sha256": tests,
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


def run_tests(
    house: House,
    env: Env,
    wheel: Wheel,
    faults: Iterable[str],
    *,
    guards: bool,
    sample: int = 0,
    index: Path | None = None,
) -> dict[str, dict]:
    """Run the tests of `faults`, and the guards where asked, on `wheel` in a stack; test id -> what happened.

    `sample` bounds the tests of each fault, spread over all of them (0: all). `index` holds the wheel, the candidate
    index by default. Raises CouldNotRun where pytest ended for another reason than a test.
    """
    upstream = wheel.pin.upstream.name
    folder = site(house, env, wheel.path.name, wheel.sha256, index)
    say(f"testing {wheel.path.name} in {env.stack.name}")
    others = [p.parent for p in (house.tests / "resume").glob("*/__init__.py")]
    ignored = [p for p in others if p.name not in (upstream, "standin")]
    name = f"prove-{wheel.path.name.removesuffix('.whl')}-{env.stack.name}"
    with tempfile.TemporaryDirectory(prefix="carry-prove-") as scratch:
        report = Path(scratch) / "report.json"
        paths = [folder, house.tests]
        if sample:
            # alone in a folder, so that nothing else of this environment gets in front of the stack's
            plugin = Path(scratch) / "plugin"
            plugin.mkdir()
            shutil.copy(Path(__file__).with_name("sampling.py"), plugin / "carry_sampling.py")
            paths.append(plugin)
        command = [
            str(env.python), "-m", "pytest", str(house.tests / "resume"), "-n", "3", "--dist", "worksteal",
            "-p", "no:cacheprovider", "--tb=short", "--basetemp", str(Path(scratch) / "tmp"),
            "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning", "-W", "ignore::UserWarning",
            f"--carry-upstream={upstream}", f"--carry-faults={','.join(faults)}",
            f"--carry-report={report}", *([] if guards else ["--carry-only"]),
            *(["-p", "carry_sampling", f"--carry-sample={sample}"] if sample else []),
            *(f"--ignore={path}" for path in ignored),
        ]  # fmt: skip
        code = call(house, command, paths, name, _LIMIT_S)
        outcomes = json.loads(report.read_bytes())["outcomes"] if report.exists() else {}
    unexpected = any(not outcome["as_expected"] for outcome in outcomes.values())
    if code == _NO_TESTS and not guards:
        return {}
    if code not in (0, 1) or (code == 1 and not unexpected):
        # a broken test file, a crashed worker: whatever the tests said, not all of them had a say
        raise CouldNotRun(f"pytest ended with code {code} for another reason than a test; see build/logs/{name}.log")
    return outcomes


def _write(house: House, document: dict) -> Path:
    name = document["wheel"]["file"].removesuffix(".whl")
    path = house.proofs / name / f"{document['stack']['name']}.json"
    write_document(document, "proof", path)
    return path
