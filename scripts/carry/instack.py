"""Run a command in a stack, with a wheel's site folder and our tests on its path."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from carry.errors import CouldNotRun
from carry.paths import House
from carry.progress import say


def call(
    house: House, command: list[str], paths: Sequence[Path], name: str, limit_s: int, *, quiet: bool = False
) -> int:
    """Run `command` with its progress on the terminal, unless `quiet`, and all of its output in
    build/logs/<name>.log; its exit code.

    `paths` go on PYTHONPATH, the site folder first. The command and its children end with it, or after `limit_s`
    seconds, which raises CouldNotRun.
    """
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON", "CARRY_"))},
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # what DeepSpeed compiles where it runs, kept from run to run
        "TORCH_EXTENSIONS_DIR": str(house.build / "extensions" / paths[0].name),
    }
    log = house.build / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as handle, subprocess.Popen(
        command, cwd=house.root, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        # the command and its ranks are a session of their own, so that all of them can be ended together
        expired = []

        def end() -> None:
            expired.append(True)
            os.killpg(process.pid, signal.SIGKILL)

        late = threading.Timer(limit_s, end)
        late.start()
        try:
            for line in process.stdout:
                handle.write(line)
                if not quiet:
                    say(line.decode(errors="replace").rstrip("\n"))
            code = process.wait()
        finally:
            late.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    if expired:
        raise CouldNotRun(f"the tests took more than {limit_s // 60} minutes; see {house.relative(log)}")
    return code
