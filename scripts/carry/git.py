"""git, reached through one function and cut off from the user's own configuration."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from carry.errors import CarryError, CouldNotRun

# Settings that would change bytes or run foreign code, whatever a repository's own config says.
_SETTINGS = (
    "core.autocrlf=false",
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.quotePath=false",
    "commit.gpgSign=false",
    "tag.gpgSign=false",
    "gc.auto=0",
    "safe.directory=*",
    "apply.whitespace=nowarn",
    "diff.algorithm=myers",
    "diff.mnemonicPrefix=false",
    "advice.detachedHead=false",
)
_DISK_FULL = ("no space left on device", "disk quota exceeded", "file too large", "short write")


class GitFailed(CarryError):
    """A git command failed where it should not have."""

    def __init__(self, args: Sequence[str], code: int, stdout: str, stderr: str):
        self.code, self.stdout, self.stderr = code, stdout, stderr
        said = " | ".join((stderr or stdout).strip().splitlines()) or "(no output)"
        super().__init__(f"`git {' '.join(args)}` exited {code}: {said}")


def environment(ceiling: Path | None = None) -> dict[str, str]:
    """The environment every git runs in: nothing of the user's git, C locale, UTC.

    `ceiling` is the folder above which git looks for no repository; without it
    `git apply` inside some other checkout exits 0 and applies nothing.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C.UTF-8",
        "LANGUAGE": "C",
        "TZ": "UTC",
    }
    if ceiling is not None:
        env["GIT_CEILING_DIRECTORIES"] = str(ceiling.resolve())
    return env


def git_bytes(
    args: Sequence[str],
    cwd: Path,
    *,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    ok: Sequence[int] = (0,),
) -> tuple[int, bytes, str]:
    """Run `git args` in `cwd`; returns (exit code, stdout, stderr).

    Raises CouldNotRun where git is missing or the disk is full, GitFailed for
    an exit code that is not in `ok`.
    """
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    try:
        done = subprocess.run(
            ["git", *settings, *args],
            cwd=cwd,
            input=stdin if stdin is not None else b"",
            capture_output=True,
            env={**environment(cwd.parent), **(env or {})},
        )
    except FileNotFoundError:
        if not cwd.is_dir():
            raise
        raise CouldNotRun("git is not on the PATH; install git 2.32 or newer and run again") from None
    stderr = done.stderr.decode("utf-8", "replace")
    if done.returncode in ok:
        return done.returncode, done.stdout, stderr
    if done.returncode == -signal.SIGXFSZ or any(words in stderr.lower() for words in _DISK_FULL):
        raise CouldNotRun(f"no space left while git wrote below {cwd}; free some and run again")
    raise GitFailed(args, done.returncode, done.stdout.decode("utf-8", "replace"), stderr)


def git(args: Sequence[str], cwd: Path, **kwargs) -> str:
    """stdout of `git args` in `cwd`, without the last newline. Raises as `git_bytes`."""
    return git_bytes(args, cwd, **kwargs)[1].decode("utf-8", "surrogateescape").rstrip("\n")
