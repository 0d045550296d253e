"""Environments that tests run in: one per stack, and a small site folder per wheel laid over it.

A second release costs a second, not a gigabyte: its wheel is installed by hash,
without dependencies, into a folder that goes in front of the stack on
PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from carry.buildenv import pip_places, run_uv
from carry.errors import CouldNotRun, UserError
from carry.extras import load_extras, unpack_extras
from carry.paths import House
from carry.pins import tomllib
from carry.progress import say
from carry.sources import file_sha256


@dataclass(frozen=True)
class Stack:
    """A locked environment: `lock` holds every package, `cuda` what a CUDA build of torch needs besides.

    `extra` lists sources that no installer can bring (see `extras`).
    """

    name: str
    lock: Path
    cuda: Path
    extra: Path
    sha256: str


@dataclass(frozen=True)
class Env:
    """An installed stack; `torch` and `python` are full versions, as a proof records them."""

    stack: Stack
    python: Path
    python_version: str
    torch: str


def stack_names(house: House) -> list[str]:
    return sorted(p.name[:-4] for p in house.stacks.glob("*.txt") if not p.name.endswith(".cuda.txt"))


def python_misfit(lock: Path) -> str | None:
    """What is wrong with this Python for the stack of `lock`, by its first line `# python: >=3.10,<3.13`.

    None where it will do, or where the lock has no such line. Raises UserError where that line says nothing.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    with open(lock, encoding="utf-8") as handle:
        marker = re.match(r"# python: *(\S.*)", handle.readline())
    if not marker:
        return None
    try:
        wanted = SpecifierSet(marker[1].strip())
    except InvalidSpecifier:
        raise UserError(f"ci/stacks/{lock.name}:1: {marker[1]!r} is no range; write it as >=3.10,<3.13") from None
    seen = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if wanted.contains(seen):
        return None
    newest = next((f"3.{minor}" for minor in range(30, 9, -1) if wanted.contains(f"3.{minor}")), "3.x")
    return f"stack {lock.stem} needs Python {marker[1].strip()} and this is {seen}; run `make PYTHON=python{newest} …`"


def load_stack(house: House, name: str) -> Stack:
    """The stack called `name` in ci/stacks. Raises UserError, naming those there are."""
    lock = house.stacks / f"{name}.txt"
    if not lock.is_file():
        raise UserError(f"no stack {name!r} in ci/stacks/; there is: {', '.join(stack_names(house)) or 'none'}")
    cuda = lock.with_suffix(".cuda.txt")
    extra = lock.with_suffix(".extra.toml")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (lock, cuda, extra) if path.exists()))
    return Stack(name, lock, cuda, extra, digest.hexdigest())


def fitting_stacks(house: House, upstream: str, version: str) -> list[str]:
    """The stacks that ci/stacks/releases.toml says can run a release, best first. Raises UserError: it is malformed."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    path = house.stacks / "releases.toml"
    shown = house.relative(path)
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get(upstream, {}) if path.exists() else {}
        return [name for name, releases in rows.items() if SpecifierSet(releases).contains(version)]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{shown}: not valid TOML ({error}); correct it") from None
    except (InvalidSpecifier, AttributeError, TypeError):
        raise UserError(f'{shown}:1: [{upstream}] holds something else than "stack" = ">=1,<2"; correct it') from None


def install_stack(house: House, name: str) -> Env:
    """The stack's environment, made where it is not there yet; one made from another lock is removed.

    Raises CouldNotRun where the index cannot be reached or the stack is not for this Python.
    """
    stack = load_stack(house, name)
    misfit = python_misfit(stack.lock)
    if misfit:
        raise CouldNotRun(misfit)
    folder = house.build / "envs" / name
    python = folder / "bin" / "python"
    ready = folder / "ready"
    wanted = f"{stack.sha256} {'.'.join(map(str, sys.version_info[:3]))} {sys.base_prefix}\n"
    if not (ready.exists() and ready.read_text() == wanted):
        say(f"installing stack {name}: gigabytes and a minute the first time, seconds later")
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        env = _uv_env()
        run_uv(["venv", "--quiet", "--no-config", "--python", sys.executable, str(folder)], env, "uv venv", house)
        _install(house, python, stack.lock, env)
        if stack.cuda.exists() and _is_cuda_build(folder):
            _install(house, python, stack.cuda, env)
        if stack.extra.exists():
            (packages,) = folder.glob("lib/python*/site-packages")
            unpack_extras(house, load_extras(house, stack.extra), packages)
        # a virtual environment cannot be renamed, so a mark written last says that it is whole
        ready.write_text(wanted)
    return Env(stack, python, ".".join(map(str, sys.version_info[:3])), _dist(folder, "torch").version)


def site(house: House, env: Env, wheel: str, sha256: str, index: Path | None = None) -> Path:
    """A folder that holds `wheel` (a file name of `index`, the candidate one by default) and nothing else, by hash.

    Raises UserError where the index has no such wheel.
    """
    index = index or house.candidate
    project, version, _ = wheel.split("-", 2)
    folder = house.build / "sites" / wheel.removesuffix(".whl")
    mark = folder / ".sha256"
    if mark.exists() and mark.read_text().strip() == sha256:
        return folder
    if not list(index.glob(f"*/{wheel}")):
        raise UserError(f"{wheel} is not in {house.relative(index)}; run `make build-wheels`")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".site-") as scratch:
        want = Path(scratch) / "requirements.txt"
        want.write_text(f"{project}=={version} --hash=sha256:{sha256}\n")
        new = Path(scratch) / "site"
        run_uv(
            ["pip", "install", "--quiet", "--no-config", "--python", str(env.python), "--target", str(new),
             "--no-deps", "--require-hashes", "--no-cache", "--default-index", index.as_uri(),
             "-r", str(want)],
            {k: v for k, v in os.environ.items() if not k.startswith("UV_")},
            f"installing {wheel}",
            house,
        )  # fmt: skip
        (new / ".sha256").write_text(sha256 + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)
    return folder


def _install(house: House, python: Path, lock: Path, env: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="carry-lock-") as scratch:
        wanted = Path(scratch) / lock.name
        wanted.write_text(with_local_builds(lock.read_text(), env.get("UV_FIND_LINKS", "").split(",")))
        run_uv(
            ["pip", "install", "--quiet", "--no-config", "--python", str(python), "--require-hashes", "--no-deps",
             "--only-binary=:all:", "-r", str(wanted)],
            env,
            f"installing {lock.name}",
            house,
        )  # fmt: skip


def with_local_builds(lock: str, folders: Iterable[str]) -> str:
    """`lock` with name==version+local where a folder has that build and its hash is among those of name==version.

    uv prefers the local build, and knows the hashes of the version without it only.
    """
    for folder in filter(None, folders):
        for wheel in sorted(Path(folder.removeprefix("file://")).glob("*+*.whl")):
            name, version = wheel.name.split("-")[:2]
            start = f"{name}=={version.partition('+')[0]} "
            if re.search(rf"^{re.escape(start)}", lock, re.MULTILINE) and file_sha256(wheel) in lock:
                lock = re.sub(rf"^{re.escape(start)}", f"{name}=={version} ", lock, flags=re.MULTILINE)
    return lock


def _uv_env() -> dict[str, str]:
    return {**os.environ, "UV_NO_PROGRESS": "1", **pip_places()}


def _is_cuda_build(folder: Path) -> bool:
    torch = _dist(folder, "torch")
    return not torch.version.endswith("+cpu") and "nvidia-" in torch.metadata


@dataclass(frozen=True)
class _Dist:
    version: str
    metadata: str


def _dist(folder: Path, project: str) -> _Dist:
    for path in folder.glob(f"lib/python*/site-packages/{project}-*.dist-info/METADATA"):
        text = path.read_text(encoding="utf-8", errors="replace")
        version = re.search(r"^Version: (\S+)$", text, re.MULTILINE)
        if version:
            return _Dist(version.group(1), text)
    raise CouldNotRun(f"{folder} holds no {project}; remove the folder and run again")
