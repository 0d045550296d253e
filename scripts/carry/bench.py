"""What the tool costs, each time against a named peer in the same run, in rounds that take turns.

Everything happens in a house of its own below build/bench/, which borrows this
house's sdists and its build environment, so that no network is measured and
nothing else is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from carry.buildenv import build_python
from carry.envs import install_stack, load_stack, site
from carry.errors import CarryError, CouldNotRun, UserError
from carry.git import git, git_bytes
from carry.lock import locked
from carry.measure import Goal, Result, Round, cost
from carry.patches import apply_series, load_series
from carry.paths import House
from carry.pins import Pin, all_pins
from carry.progress import say
from carry.schema import fault_in
from carry.signals import forget_definitions, prepare, probe
from carry.sources import fetch, file_sha256, sdist_path
from carry.trees import Release, release, temporary_index
from carry.wheels import wheel_name

_SLOW_ROUNDS = 3  # of builds and environments, each many seconds
_MAKER = {"GIT_COMMITTER_NAME": "carry", "GIT_COMMITTER_EMAIL": "maintainers@carry.invalid"}


def bench(house: House, rounds: int = 7) -> list[Result]:
    """Measure, and write each result to dist/bench/<name>.json; builds and environments take fewer rounds.

    Raises UserError where there is nothing to measure or no such stack, and as what is measured does.
    """
    pins = all_pins(house)
    if rounds < 1:
        raise UserError(f"nothing to measure in {rounds} rounds; ask for 1 or more")
    if not any(map(load_series, pins)):
        raise UserError("nothing to measure: no pin has patches; write one with `make apply`")
    load_stack(house, pins[-1].stacks[0])
    slow = min(rounds, _SLOW_ROUNDS)
    results = []
    with _scratch_house(house, pins) as scratch:
        pins = all_pins(scratch)
        patched = [pin for pin in pins if load_series(pin)]
        # The builds come first: they make the releases and the wheels that the others need.
        results.append(_write(house, _unchanged(scratch, slow, len(pins))))
        results.append(_write(house, _apply(scratch, patched[-1], rounds)))
        results.append(_write(house, _probe(scratch, patched[-1], rounds)))
        results.append(_write(house, _replay(scratch, patched[-1], pins, slow)))
        results.append(_write(house, _environment(scratch, pins[-1], slow)))
    return results


@contextmanager
def _scratch_house(house: House, pins: Sequence[Pin]) -> Iterator[House]:
    """A house with the same patches and stacks, and no wheel, release or environment made yet."""
    with locked(house.build, "carry bench", say):
        build_env = build_python(house).parents[2].resolve()
        for pin in pins:
            fetch(house, pin)
    room = house.build / "bench"
    with locked(room, "carry bench", say):
        scratch = House(room / "house")
        shutil.rmtree(scratch.root, ignore_errors=True)  # a killed run's
        try:
            # Copies, not links, of what a run sweeps: through a link it would sweep this house.
            shutil.copytree(house.patches, scratch.patches, ignore=shutil.ignore_patterns(".*"))
            shutil.copytree(house.stacks, scratch.stacks)
            for pin in pins:
                sdist_path(scratch, pin).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(sdist_path(house, pin), sdist_path(scratch, pin))
            (scratch.cache / "build-env").symlink_to(build_env)
            yield scratch
        finally:
            shutil.rmtree(scratch.root, ignore_errors=True)


def _unchanged(scratch: House, rounds: int, pins: int) -> Result:
    def build() -> None:
        command = [sys.executable, "-m", "carry.cli", "build-wheels"]
        env = {**os.environ, "CARRY_ROOT": str(scratch.root)}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no output"])[-1]
            kind = UserError if done.returncode == UserError.exit_code else CouldNotRun
            raise kind(f"the build to measure failed: {said}")

    found = []
    for number in range(1, rounds + 1):
        say(f"bench: building {2 * pins} wheels from nothing, and again, round {number} of {rounds}")
        for made in (scratch.cache / "git", scratch.cache / "wheels", scratch.candidate, scratch.dist):
            shutil.rmtree(made, ignore_errors=True)
        peer = cost(build)
        found.append(Round(cost(build), peer))
    what = f"build-wheels, {2 * pins} wheels, nothing changed"
    return Result("unchanged", what, "the same from sdists", Goal("ours_cpu_s", 1.0), tuple(found))


def _apply(scratch: House, pin: Pin, rounds: int) -> Result:
    """Both start from the release packed and none of the series' objects; `git am` from a fresh checkout."""
    series, base = load_series(pin), _packed(scratch, pin)
    say(f"bench: applying the series of {pin}, {rounds} rounds")
    files = [str(patch.path.resolve()) for patch in series]
    folder, found = scratch.root / "am", []
    git(["worktree", "add", "--quiet", "--detach", str(folder), base.commit], base.repo)
    for _ in range(rounds):
        _forget_new_objects(base.repo)
        peer = cost(lambda: git(["am", "--quiet", *files], folder, env=_MAKER))
        git(["reset", "--quiet", "--hard", base.commit], folder)
        _forget_new_objects(base.repo)
        found.append(Round(cost(lambda: apply_series(scratch, pin, series)), peer))
    what = f"apply {len(series)} patches to {pin}, as a build does"
    return Result("apply", what, "git am in a checkout", Goal("ratio", 1.0), tuple(found))


def _probe(scratch: House, pin: Pin, rounds: int) -> Result:
    folder, found = scratch.root / "probe", []
    base = _packed(scratch, pin)
    files = [patch.path.resolve() for patch in load_series(pin)]
    say(f"bench: probing {pin}, {rounds} rounds")

    def checkout() -> None:
        git(["worktree", "add", "--quiet", "--detach", str(folder), base.commit], base.repo)
        git(["apply", *map(str, files)], folder)

    # Not `git apply --check`: it tries each of several patch files on the state before the first.
    def index() -> None:
        with temporary_index(base) as probed:
            probed.apply(files)

    for _ in range(rounds):
        _forget_new_objects(base.repo)
        peer = cost(checkout)
        git(["worktree", "remove", "--force", str(folder)], base.repo)
        found.append(Round(cost(index), peer))
    what = f"probe {pin} in a temporary index"
    return Result("probe", what, "git worktree add, git apply", Goal("ratio", 0.5), tuple(found))


def _replay(scratch: House, pin: Pin, pins: Sequence[Pin], rounds: int) -> Result:
    """Ours gives every text signal; the naive loop only says which patches `git am` takes, each alone."""
    targets = [other for other in pins if other.upstream.name == pin.upstream.name]
    bases = [release(scratch, other) for other in targets]
    say(f"bench: trying the series of {pin} on {len(targets)} releases, {rounds} rounds")
    prepared, folder, found = prepare(scratch, pin), scratch.root / "replay", []

    def naive() -> None:
        for base in bases:
            git(["worktree", "add", "--quiet", "--detach", str(folder), base.commit], base.repo)
            for patch in prepared.series:
                code, _, _ = git_bytes(["am", "--quiet", str(patch.path.resolve())], folder, env=_MAKER, ok=(0, 1, 128))
                if code:
                    git(["am", "--abort"], folder)
            git(["worktree", "remove", "--force", str(folder)], base.repo)

    for _ in range(rounds):
        _forget_new_objects(bases[0].repo)
        prepare(scratch, pin)  # the objects that a merge needs were forgotten too
        forget_definitions()
        ours = cost(lambda: [probe(scratch, target, prepared) for target in targets])
        found.append(Round(ours, cost(naive)))
    what = f"replay {len(prepared.series)} patches of {pin} on {len(targets)} releases"
    return Result("replay", what, "git worktree add, git am", Goal("ratio", 1.0), tuple(found))


def _environment(scratch: House, pin: Pin, rounds: int) -> Result:
    stack, wheel = pin.stacks[0], wheel_name(pin, "patched")
    digest = file_sha256(scratch.wheels / wheel)
    say(f"bench: warming uv's cache for {stack}")
    env = install_stack(scratch, stack)
    found = []
    for number in range(1, rounds + 1):
        say(f"bench: {stack} from a warm cache, and a second release over it, round {number} of {rounds}")
        shutil.rmtree(scratch.build / "envs")
        peer = cost(lambda: install_stack(scratch, stack))
        shutil.rmtree(scratch.build / "sites", ignore_errors=True)
        found.append(Round(cost(lambda: site(scratch, env, wheel, digest)), peer))
    peer_is = f"{stack}, from a warm cache"
    return Result("environment", f"a second release over {stack}", peer_is, Goal("ratio", 0.5), tuple(found))


def _packed(scratch: House, pin: Pin) -> Release:
    base = release(scratch, pin)
    git(["repack", "-a", "-d", "--quiet"], base.repo)
    return base


def _forget_new_objects(repo: Path) -> None:
    """Remove every object that is not packed: what an earlier round wrote."""
    for folder in (repo / "objects").glob("[0-9a-f][0-9a-f]"):
        shutil.rmtree(folder)


def _write(house: House, result: Result) -> Result:
    document = result.document()
    if wrong := fault_in(document, "bench"):
        raise CarryError(f"dist/bench/{result.name}.json would be malformed at {wrong}")
    path = house.dist / "bench" / f"{result.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(beside, path)
    return result
