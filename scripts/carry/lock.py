"""One writer below build/ and dist/ at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def locked(folder: Path, who: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold `folder`'s lock; where another run holds it, say who does and wait.

    The kernel drops the lock when its holder dies, so a killed run leaves none behind.
    """
    handle = _acquire(folder, say)
    with handle:
        handle.truncate(0)
        handle.write(f"{who} (process {os.getpid()})\n")
        handle.flush()
        try:
            yield
        finally:
            handle.truncate(0)


def _acquire(folder: Path, say: Callable[[str], None]) -> TextIO:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ".lock"
        handle = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - the caller closes it
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "another run"
            say(f"{folder} is in use by {holder}; waiting for it to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        # `carry clean` removes the folder while others wait for a lock in it: theirs is then no lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle.fileno()), os.stat(path)):
                return handle
        handle.close()
