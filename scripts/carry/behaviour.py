"""What faults' tests do on a release that need not be a pin: wheels built for the purpose, runs kept and found again.

A run is kept below build/cache/behaviour/ by the hash of all that decides it, so an interrupted gate or replay goes on
where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from carry.envs import Env, fitting_stacks, install_stack, load_stack
from carry.errors import CouldNotRun, UserError
from carry.index import write_index
from carry.lock import locked
from carry.patches import Patch
from carry.paths import House
from carry.pins import Pin, load_pin, versions
from carry.progress import say
from carry.proofs import run_tests, tests_sha256
from carry.verdicts import Run, shows
from carry.wheels import Wheel, build, inputs_sha256

_KEPT = ("outcome", "symptom", "message")


def candidate_stacks(house: House, pin: Pin, near: Pin) -> list[str]:
    """Stacks to run `pin`'s release in, best first: its own where it is pinned, those of ci/stacks/releases.toml, and
    the one of `near`, the pin it is compared with. Any of them may turn out not to work."""
    own = load_pin(house, pin.upstream.name, pin.version).stacks if _pinned(house, pin) else ()
    found = [*own[:1], *fitting_stacks(house, pin.upstream.name, pin.version), near.stacks[0]]
    return list(dict.fromkeys(found))


def observe(
    house: House,
    pin: Pin,
    series: Sequence[Patch],
    stack: str,
    faults: Iterable[str],
    *,
    sample: int = 0,
    attempt: int = 1,
) -> dict[str, Run]:
    """One run of the tests of `faults` on the release of `pin` with `series` (empty: pristine), in a stack.

    Returns a run for each fault, empty where it has no test that applies; `sample` as for `run_tests`. A higher
    `attempt` runs again what a lower one has run. Raises CouldNotRun where tests cannot run in this stack, and as
    `build` and `install_stack`. Takes the locks it needs.
    """
    flavour = "patched" if series else "pristine"
    tests, lock = tests_sha256(house, pin.upstream.name), load_stack(house, stack).sha256
    inputs = inputs_sha256(pin, series, flavour)
    paths = {
        fault: house.cache / "behaviour" / f"{_digest(inputs, lock, tests, fault, sample, attempt)}.json"
        for fault in dict.fromkeys(faults)
    }
    missing = [fault for fault, path in paths.items() if not path.exists()]
    if missing:
        for fault, run in _run(house, pin, series, flavour, stack, missing, sample).items():
            _keep(paths[fault], run)
    return {fault: json.loads(path.read_bytes()) for fault, path in paths.items()}


def seen(
    house: House, pin: Pin, stacks: Iterable[str], faults: Iterable[str], sample: int
) -> tuple[str, dict[str, Run]] | None:
    """As `pristine`, of what is kept of earlier runs; None where that is nothing."""
    tests, inputs = tests_sha256(house, pin.upstream.name), inputs_sha256(pin, (), "pristine")
    for stack in stacks:
        lock = load_stack(house, stack).sha256
        found = {}
        for fault in faults:
            for size in (0, sample):  # all of its tests, where they were run
                path = house.cache / "behaviour" / f"{_digest(inputs, lock, tests, fault, size, 1)}.json"
                if fault not in found and path.exists():
                    found[fault] = json.loads(path.read_bytes())
        if can_run(found):
            return stack, found
    return None


def _run(
    house: House, pin: Pin, series: Sequence[Patch], flavour: str, stack: str, faults: Sequence[str], sample: int
) -> dict[str, Run]:
    with locked(house.build / "sites", "carry bump", say):
        env = install_stack(house, stack)
    with locked(house.build, "carry bump", say):
        wheel = _build(house, pin, series, flavour, env)
        index = house.build / "bump" / f"simple-{wheel.sha256[:16]}"
        write_index([wheel.path], index)
    try:
        with locked(house.build / "sites", "carry bump", say):
            outcomes = run_tests(house, env, wheel, faults, guards=False, sample=sample, index=index)
    finally:
        shutil.rmtree(index, ignore_errors=True)
    lost = [test for test in outcomes.values() if test["fault"] is None]
    if lost:  # a fixture failed: which fault's tests these were is not known
        raise CouldNotRun(f"a test of {pin} could not start in {stack}: {' '.join(lost[0]['message'].split())[-200:]}")
    return {
        fault: {
            name: {key: test[key] for key in _KEPT} for name, test in sorted(outcomes.items()) if test["fault"] == fault
        }
        for fault in faults
    }


def _build(house: House, pin: Pin, series: Sequence[Patch], flavour: str, env: Env) -> Wheel:
    """The wheel, as a pin's is built, else in the stack: some releases' setup.py cannot do without torch."""
    try:
        return build(house, pin, series, flavour)
    except UserError as first:
        try:
            return build(house, pin, series, flavour, env)
        except UserError:
            raise CouldNotRun(f"{pin} cannot be built: {first}") from None


def _keep(path: Path, run: Run) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    beside.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _pinned(house: House, pin: Pin) -> bool:
    return pin.version in versions(house, pin.upstream.name)


def can_run(runs: dict[str, Run]) -> bool:
    """Whether a stack can run the release at all: some test ended red or green."""
    return any(test["outcome"] != "error" for run in runs.values() for test in run.values())


def pristine(
    house: House, pin: Pin, stacks: Sequence[str], faults: Sequence[str], sample: int
) -> tuple[str, dict[str, Run]]:
    """The first of `stacks` that can run the pristine release, and one run of `faults` in it: of all its tests where
    the sample of a fault's does not tell whether it is there.

    Raises CouldNotRun, with what each said, where none can.
    """
    problems = []
    for stack in stacks:
        try:
            runs = observe(house, pin, (), stack, faults, sample=sample)
        except (CouldNotRun, UserError) as error:
            problems.append(f"{stack}: {error}")
            continue
        if can_run(runs):
            doubtful = [fault for fault, run in runs.items() if shows((run,)) is None]
            return stack, runs | in_full(house, pin, stack, {fault: runs[fault] for fault in doubtful}, sample)
        said = next((t["message"] for run in runs.values() for t in run.values()), "no test of these faults runs there")
        problems.append(f"{stack}: every test is an error ({' '.join((said or '').split())[:120]})")
    raise CouldNotRun(f"{pin}: no stack runs its tests: {'; '.join(problems) or 'none fits'}")


def in_full(house: House, pin: Pin, stack: str, runs: dict[str, Run], sample: int) -> dict[str, Run]:
    """Pristine runs of all tests of those faults of `runs` of which only a sample was run."""
    cut = [fault for fault, run in runs.items() if len(run) == sample]
    return observe(house, pin, (), stack, cut) if cut else {}
