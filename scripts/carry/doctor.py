"""What a machine needs to make wheels, each thing looked at once."""

from __future__ import annotations

import re
import shutil
import sys
from typing import NamedTuple

from carry.errors import CarryError
from carry.paths import House

_GIB = 1 << 30
_GIT = (2, 32)  # the first with GIT_CONFIG_GLOBAL


class Check(NamedTuple):
    """One thing looked at: whether it will do, and what was seen or what to do about it."""

    name: str
    ok: bool
    seen: str


def examine(house: House) -> list[Check]:
    """Every check, in the order in which a build would meet them. Starts git, pip and nothing else."""
    return [_python(), _git(house), _uv(), _pip(), _stacks(house), _disk(house)]


def _python() -> Check:
    import tarfile

    seen = ".".join(map(str, sys.version_info[:3]))
    if not hasattr(tarfile, "data_filter"):
        return Check("python", False, f"{seen} unpacks without a data filter; use 3.10.12, 3.11.4 or newer")
    return Check("python", True, seen)


def _git(house: House) -> Check:
    from carry.git import git

    try:
        seen = git(["--version"], house.root)
    except CarryError as error:
        return Check("git", False, str(error))
    numbers = re.search(r"(\d+)\.(\d+)", seen)
    ok = bool(numbers) and (int(numbers[1]), int(numbers[2])) >= _GIT
    return Check("git", ok, seen if ok else f"{seen}; install {_GIT[0]}.{_GIT[1]} or newer")


def _uv() -> Check:
    try:
        from uv import find_uv_bin

        return Check("uv", True, find_uv_bin())
    except (ImportError, FileNotFoundError) as error:
        return Check("uv", False, f"{error}; remove .venv and run make again")


def _pip() -> Check:
    from carry.download import pip_config, shown_url

    try:
        config = pip_config()
    except CarryError as error:
        return Check("pip", False, str(error))
    places = [shown_url(place) for place in (*config.indexes, *config.find_links)]
    return Check("pip", bool(places), "looks in " + ", ".join(places) if places else "has no index; set index-url")


def _stacks(house: House) -> Check:
    from carry.envs import python_misfit, stack_names

    names = stack_names(house)
    try:
        wrong = [line for name in names if (line := python_misfit(house.stacks / f"{name}.txt"))]
    except CarryError as error:
        return Check("stacks", False, str(error))
    return Check("stacks", not wrong, "; ".join(wrong) or f"this Python will do for {', '.join(names) or 'none'}")


def _disk(house: House) -> Check:
    free = shutil.disk_usage(house.root).free / _GIB
    return Check("disk", free >= 10, f"{free:.0f} GiB free" + ("" if free >= 10 else "; test stacks need 10"))
