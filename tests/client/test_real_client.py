"""A user's own pip and uv install the published wheel into an environment that already holds torch.

1. An environment with torch as the user has it: uv links it out of its cache, so one costs about a second.
2. dist/simple/ is served on loopback, and the very lines that are shown to users are run. DeepSpeed's
   dependencies come from wherever pip is configured to look, as they would for the user.
3. DeepSpeed imports, its files are those of the wheel, its metadata says which faults it fixes, and torch is
   what it was, byte for byte.
4. The same lines against an index without our wheel, or with another hash, fail and install nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from carry.buildenv import pip_places
from carry.index import write_index
from carry.paths import find_house
from carry.pins import load_pin
from carry.server import open_server
from carry.welcome import install_lines
from carry.wheels import wheel_name
from uv import find_uv_bin

VERSION = "0.19.8"
TORCH = re.search(r"^torch==(\S+)", (find_house().stacks / "deepspeed-torch213.txt").read_text(), re.M).group(1)
FAULTS = {"zero3-module-only", "zero3-tag-ignored", "stage0-stale-masters", "fresh-optimizer-no-files"}
# The line that README.md gives to users, plus what this test wants to know besides.
ASK = """
import json, importlib.metadata
faults = json.loads(importlib.metadata.distribution("deepspeed").read_text("carry.json"))["faults"]
import deepspeed
print(json.dumps({"faults": faults, "version": deepspeed.__version__, "file": deepspeed.__file__}))
"""
TOOLS = ("pip", "uv")


class Published(NamedTuple):
    wheel: Path
    requirement: str
    sha256: str


class Env(NamedTuple):
    """A virtual environment in `folder`, and torch's version and files as they were before our install."""

    folder: Path
    torch: tuple[str, str]

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def site(self, pattern: str) -> list[Path]:
        return list(self.folder.glob(f"lib/python*/site-packages/{pattern}"))


@pytest.fixture(scope="module")
def published() -> Published:
    house = find_house()
    pin = load_pin(house, "deepspeed", VERSION)
    wheel = house.simple / "deepspeed" / wheel_name(pin, "patched")
    assert wheel.is_file(), f"{house.relative(wheel)} is not published; run `make index`"
    requirement = f"deepspeed=={VERSION}+resume.{pin.revision}"
    return Published(wheel, requirement, hashlib.sha256(wheel.read_bytes()).hexdigest())


@contextlib.contextmanager
def serving(root: Path) -> Iterator[str]:
    with open_server(root) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"{server.url}simple/"
        server.shutdown()


@pytest.fixture(scope="module")
def index(published) -> Iterator[str]:
    with serving(published.wheel.parents[1]) as url:
        yield url


@pytest.fixture(scope="module")
def index_without(tmp_path_factory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("without") / "simple"
    write_index([], root)
    with serving(root) as url:
        yield url


@pytest.fixture(scope="module")
def places() -> dict[str, str]:
    """uv told to look where pip is configured to; which index wins stays uv's own default."""
    return {name: value for name, value in pip_places().items() if name != "UV_INDEX_STRATEGY"}


def run(args: list, places: dict[str, str], env: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`args` as typed in a shell where the environment `env` is active."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    path = os.pathsep.join([str(env / "bin"), str(Path(find_uv_bin()).parent), environ.get("PATH", "")])
    environ |= {**places, "VIRTUAL_ENV": str(env), "PATH": path}
    return subprocess.run(
        list(map(str, args)), env=environ, cwd=cwd or env, capture_output=True, text=True, timeout=600
    )


@pytest.fixture
def env(tmp_path, places) -> Env:
    """A fresh environment with torch, and with pip of its own."""
    folder = tmp_path / "env"
    with_mirrors = {"UV_INDEX_STRATEGY": "unsafe-best-match", **places}
    for args in (
        ["venv", "--quiet", "--seed", "--python", sys.executable, folder],
        ["pip", "install", "--quiet", "--python", folder / "bin" / "python", f"torch=={TORCH}"],
    ):
        done = subprocess.run(
            [find_uv_bin(), *map(str, args)], env=os.environ | with_mirrors, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    made = Env(folder, ("", ""))
    assert made.site("deepspeed*") == []
    return made._replace(torch=torch_of(made))


def torch_of(env: Env) -> tuple[str, str]:
    """Name of torch's one dist-info, and the hash of its RECORD with every recorded file's size and mtime."""
    (info,) = env.site("torch-*.dist-info")
    record = (info / "RECORD").read_bytes()
    digest = hashlib.sha256(record)
    for row in record.decode().splitlines():
        path = info.parent / row.rsplit(",", 2)[0]
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return info.name, digest.hexdigest()


def assert_ours(env: Env, published: Published, places: dict[str, str]) -> None:
    """DeepSpeed is the published wheel, file by file, imports, says what it fixes; torch was left alone."""
    done = run([env.python, "-c", ASK], places, env.folder)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["version"] == published.requirement.partition("==")[2]
    assert Path(said["file"]).is_relative_to(env.folder)
    (info,) = env.site("deepspeed-*.dist-info")
    with zipfile.ZipFile(published.wheel) as wheel:
        names = [name for name in wheel.namelist() if name.startswith("deepspeed/")]
        assert len(names) > 500
        assert [name for name in names if (info.parent / name).read_bytes() != wheel.read(name)] == []
        carry = json.loads(wheel.read(f"{info.name}/carry.json"))
    assert set(said["faults"]) == set(carry["faults"]) >= FAULTS
    assert torch_of(env) == env.torch


def assert_refused(done: subprocess.CompletedProcess[str], env: Env) -> None:
    assert done.returncode != 0 and "deepspeed" in done.stderr.lower(), done.stdout
    assert env.site("deepspeed-*.dist-info") == [] and not env.site("deepspeed/__init__.py")
    assert torch_of(env) == env.torch


PROJECT = """
[project]
name = "user"
version = "1"
requires-python = ">=3.10"
dependencies = ["{requirement}"]

[[tool.uv.index]]
name = "carry"
url = "{index}"
explicit = true

[tool.uv.sources]
deepspeed = {{ index = "carry" }}
"""


@pytest.mark.parametrize("tool", TOOLS)
def test_a_user_installs_the_patched_release(tool, env, published, index, index_without, places):
    def install(line: list, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return run(line, places, env.folder, cwd)

    def shown(url: str) -> list[str]:
        return shlex.split(install_lines(url, published.requirement)[tool])

    done = install(shown(index_without))
    assert_refused(done, env)
    assert VERSION in done.stderr

    done = install(shown(index))
    assert done.returncode == 0, done.stderr
    assert_ours(env, published, places)

    # By hash: what is installed already is trusted, our one file must be the one that was named.
    requirements = env.folder / "deepspeed.txt"
    for sha256 in ("0" * 64, published.sha256):
        uninstall(tool, env, places)
        requirements.write_text(f"{published.requirement} --hash=sha256:{sha256}\n")
        done = install([*shown(index)[:-1], "--no-deps", "--require-hashes", "-r", requirements])
        if sha256 != published.sha256:
            assert_refused(done, env)
    assert done.returncode == 0, done.stderr
    assert_ours(env, published, places)

    if tool == "uv":
        uninstall(tool, env, places)
        project, line = env.folder / "project", ["uv", "pip", "install", "-r", "pyproject.toml"]
        project.mkdir()
        # Even a requirement that the public index could meet is not looked up there.
        loose = published.requirement.partition("+")[0]
        (project / "pyproject.toml").write_text(PROJECT.format(requirement=loose, index=index_without))
        assert_refused(install(line, project), env)
        (project / "pyproject.toml").write_text(PROJECT.format(requirement=published.requirement, index=index))
        done = install(line, project)
        assert done.returncode == 0, done.stderr
        assert_ours(env, published, places)


def uninstall(tool: str, env: Env, places: dict[str, str]) -> None:
    line = ["pip", "uninstall", "--quiet", "--yes"] if tool == "pip" else ["uv", "pip", "uninstall", "--quiet"]
    if env.site("deepspeed-*.dist-info"):
        done = run([*line, "deepspeed"], places, env.folder)
        assert done.returncode == 0, done.stderr
