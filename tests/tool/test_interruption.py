"""Kills, full disks and second runs: nothing half-done is taken for done, and the next run carries on."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from carry.lock import locked
from toyhouse import ToyHouse

PATCHED = "toy-1.0+resume.1-py3-none-any.whl"
SCRATCH = (
    "cache/.unpack-*",
    "cache/git/.new-*",
    "cache/sdists/*/.fetch-*",
    "cache/wheels/.build-*",
    "trees/.new-*",
)


def wait_for(what: Callable[[], object], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def scratch(toy: ToyHouse) -> list[Path]:
    return [path for pattern in SCRATCH for path in (toy.root / "build").glob(pattern)]


def assert_carries_on(toy: ToyHouse) -> None:
    done = toy.run("build-wheels")
    assert PATCHED in done.stdout
    assert (toy.root / "dist" / "wheels" / PATCHED).exists()
    assert scratch(toy) == []


@pytest.mark.parametrize("pattern", SCRATCH[:4])
def test_a_run_killed_in_any_stage(builder: ToyHouse, pattern: str):
    """SIGKILL as soon as the stage's scratch appears: no handler runs."""
    running = builder.start("build-wheels")
    wait_for(lambda: list((builder.root / "build").glob(pattern)), running)
    running.kill()
    running.communicate()
    assert not (builder.root / "dist").exists()
    assert_carries_on(builder)


def test_a_build_killed_while_setuptools_runs(builder: ToyHouse):
    running = builder.start("build-wheels")
    wait_for(lambda: list((builder.root / "build" / "cache" / "wheels").glob(".build-*/tree/build")), running)
    running.kill()
    running.communicate()
    assert not list((builder.root / "build" / "cache" / "wheels").glob("*/sha256"))
    assert_carries_on(builder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_128_and_its_number_and_cleans_up(builder: ToyHouse, number: int):
    running = builder.start("build-wheels")
    wait_for(lambda: list((builder.root / "build" / "cache" / "wheels").glob(".build-*")), running)
    running.send_signal(number)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    assert said.splitlines()[-1] == "carry: interrupted; run the same command again to carry on"
    assert scratch(builder) == []
    assert_carries_on(builder)


@pytest.mark.parametrize(
    ("limit", "where"),
    [(64, "build/cache/git"), (700, "build/cache/sdists/"), (4000, f"while building {PATCHED}")],
)
def test_a_disk_that_is_full_in_any_stage(builder: ToyHouse, limit: int, where: str):
    """A limit on every file's size in bytes stands in for the disk: git's own files do not fit, then the
    sdist, then what the build writes."""
    done = subprocess.run(
        [sys.executable, "-m", "carry.cli", "build-wheels"],
        cwd=builder.root, env=builder.environment(), capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 13, (done.stdout, done.stderr)
    said = done.stderr.splitlines()[-1]
    assert said.startswith("carry: no space left ") and where in said and "Traceback" not in done.stderr
    assert not (builder.root / "dist" / "wheels" / PATCHED).exists()
    assert_carries_on(builder)


def test_a_second_run_waits_and_says_for_whom(toy: ToyHouse):
    with locked(toy.house.build, "carry prove", lambda line: None):
        second = toy.start("apply", "toy", "1.0")
        assert second.stderr is not None
        said = second.stderr.readline()
        assert said == (f"{toy.root}/build is in use by carry prove (process {os.getpid()}); waiting for it to end\n")
        time.sleep(0.2)
        assert second.poll() is None and not toy.tree.exists()
    out, _ = second.communicate(timeout=60)
    assert (second.returncode, out) == (0, "build/trees/toy-1.0\n")


def test_two_runs_at_once_both_succeed(builder: ToyHouse):
    runs = [builder.start("build-wheels") for _ in range(2)]
    outs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outs
    assert sorted(out.split()[0] for out, _ in outs) == ["built", "unchanged"]


def test_a_killed_holder_leaves_no_lock(toy: ToyHouse):
    code = (
        "import sys, time; from pathlib import Path; from carry.lock import locked\n"
        "with locked(Path(sys.argv[1]), 'x', print): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(toy.house.build)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    holder.kill()
    holder.communicate()
    assert toy.run("apply", "toy", "1.0").stderr.splitlines() == ["fetching toy-1.0.tar.gz"]


def test_clean_under_a_waiting_run_does_not_give_two_owners(tmp_path: Path):
    """The lock's file is removed while held; who takes the new one is alone, and so is who waited."""
    import shutil

    folder = tmp_path / "build"
    with locked(folder, "first", lambda line: None):
        shutil.rmtree(folder)
        with locked(folder, "second", lambda line: pytest.fail(line)):
            assert (folder / ".lock").read_text().startswith("second")
