"""The environment wheels are built in, and uv, which makes it and builds in it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from carry.errors import CouldNotRun, UserError
from carry.paths import House
from carry.progress import say

BUILD_PINS = Path(__file__).with_name("build-pins.txt")
_DISK_FULL = ("no space left on device", "disk quota exceeded", "os error 28", "file too large")


def build_python(house: House) -> Path:
    """The interpreter of the environment wheels are built in: pinned setuptools and wheel, nothing else."""
    version = ".".join(map(str, sys.version_info[:3]))
    key = hashlib.sha256(BUILD_PINS.read_bytes() + f"{version} {sys.base_prefix}".encode()).hexdigest()[:16]
    folder = house.cache / "build-env" / key
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    say("making the environment that wheels are built in")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A virtual environment cannot be renamed, so a mark written last says that it is whole.
    env = {**os.environ, "UV_NO_PROGRESS": "1", **pip_places()}
    run_uv(["venv", "--quiet", "--no-config", "--python", sys.executable, str(folder)], env, "uv venv", house)
    run_uv(
        [
            "pip",
            "install",
            "--quiet",
            "--no-config",
            "--python",
            str(python),
            "--require-hashes",
            "--no-deps",
            "--only-binary=:all:",
            "-r",
            str(BUILD_PINS),
        ],
        env,
        "installing build-pins.txt",
        house,
    )
    (folder / "ready").touch()
    return python


def pip_places() -> dict[str, str]:
    """uv's variables for where pip is configured to look; what the user set for uv itself wins."""
    from carry.download import pip_config

    config = pip_config()
    env = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    if config.indexes:
        env["UV_DEFAULT_INDEX"] = config.indexes[0]
        env["UV_INDEX"] = " ".join(config.indexes[1:])
    else:
        env["UV_NO_INDEX"] = "1"
    env["UV_FIND_LINKS"] = ",".join(config.find_links)
    if config.cert:
        env["SSL_CERT_FILE"] = config.cert
    return {key: value for key, value in env.items() if value and key not in os.environ}


def _wait_for_group(number: int) -> None:
    """Give the killed children of a dead leader a moment to end: what a call wrote last still lands.

    Where nobody reaps orphans, they stay in their group for ever; they write nothing more.
    """
    deadline = time.monotonic() + 1
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(number, 0)
            time.sleep(0.01)


def run_uv(args: Sequence[str], env: dict[str, str], what: str, house: House, work: Path | None = None) -> str:
    """Run uv under umask 022; returns the shown path of its log. Raises CouldNotRun, or UserError for a
    build."""
    from uv import find_uv_bin

    log = house.build / "logs" / (re.sub(r"[^\w.+-]+", "-", what) + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as handle:
        process = subprocess.Popen(
            [find_uv_bin(), *args],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            umask=0o022,
            start_new_session=True,
        )
        try:
            code = process.wait()
        except BaseException:
            # uv's own children too: a build that goes on would write into what is about to be removed
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _wait_for_group(process.pid)
            raise
    shown = house.relative(log)
    if code:
        text = log.read_text(encoding="utf-8", errors="replace")
        if code == -signal.SIGXFSZ or any(words in text.lower() for words in _DISK_FULL):
            raise CouldNotRun(f"no space left while {what}; free some and run again")
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
        kind = UserError if work else CouldNotRun
        raise kind(f"{what} failed: {last[:200]}; see {shown}")
    return shown
