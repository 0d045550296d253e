"""A house with one small upstream, `toy`: a real sdist, real git, real builds, no network."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from carry.git import git
from carry.paths import House
from carry.pins import Pin, load_pin

STAMP = 1_600_000_000  # the release's date, as in its PKG-INFO

SETUP = """
import os, pathlib, sys
from setuptools import setup

version = "1.0" + os.environ.get("TOY_LOCAL", "")
pathlib.Path("toy/built.py").write_text(
    f"version={version!r}\\ncompiler={os.environ.get('CC', 'none')!r}\\nhost={os.getcwd()!r}\\n")
setup(name="toy", version=version, packages=["toy", "toy.native"], scripts=["bin/toy"],
      extras_require={"all": list({"einops", "numpy", "hjson", "psutil"})})
"""
CORE = "".join(f"line_{number} = {number}\n" for number in range(1, 41))
FILES: dict[str, str] = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
    "setup.py": SETUP,
    "bin/toy": "#!/usr/bin/env python\nprint('toy')\n",
    "native/__init__.py": "",
    "native/op.py": "def op():\n    return 1\n",
    "native/once.py": "only = 'in the original'\n",
    "toy/__init__.py": "from toy.core import *\n",
    "toy/core.py": CORE,
    "toy/built.py": "version='1.0 '\ncompiler='upstream'\nhost='upstream'\n",
    "toy/native/__init__.py": "",
    "toy/native/op.py": "def op():\n    return 1\n",
}
UPSTREAM = """
name = "toy"
import = "toy"
newest = "1.0"
[mirrors]
"toy/native" = "native"
[wheel]
env = { TOY_LOCAL = "+{local}" }
[wheel.generated]
"toy/built.py" = ["version="]
"""
TRAILERS = """\
Fault: {fault}
Bug: https://example.org/bugs/1
Affects: >=0.9
Upstream-Status: Pending
Proof: tests/resume/test_toy.py
"""


def make_sdist(
    path: Path,
    files: Mapping[str, str] = FILES,
    extra: Callable[[tarfile.TarFile], object] = lambda archive: None,
    version: str = "1.0",
) -> str:
    """Write an sdist; `extra` may add members to it. Returns its sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(path, "wb", mtime=STAMP) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"toy-{version}/{name}")
            member.size, member.mtime = len(text.encode()), STAMP
            member.mode = 0o755 if name.startswith("bin/") else 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
        extra(archive)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class ToyHouse:
    """A repository to run `carry` in. `links` is the folder that pip is told to look in, and no index."""

    root: Path
    links: Path

    @property
    def house(self) -> House:
        return House(self.root)

    @property
    def pin(self) -> Pin:
        return load_pin(self.house, "toy", "1.0")

    @property
    def folder(self) -> Path:
        return self.root / "patches" / "toy" / "1.0"

    @property
    def tree(self) -> Path:
        return self.root / "build" / "trees" / "toy-1.0"

    @property
    def pin_file(self) -> Path:
        return self.folder / "pin.toml"

    def patches(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.folder.glob("*.patch"))}

    def environment(self, **more: str) -> dict[str, str]:
        """The caller's environment without anything that tells pip, uv or git where to look."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_", "GIT_"))}
        return kept | {
            "CARRY_ROOT": str(self.root),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.links),
        } | more  # fmt: skip

    def run(self, *args: str, check: int | None = 0, **more: str) -> subprocess.CompletedProcess[str]:
        """`carry args` as a process of its own; its exit code must be `check` (None: any)."""
        done = subprocess.run(
            [sys.executable, "-m", "carry.cli", *args],
            cwd=self.root, env=self.environment(**more), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert check is None or done.returncode == check, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def start(self, *args: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "carry.cli", *args],
            cwd=self.root,
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def edit(self, file: str, old: str, new: str) -> None:
        """Change a file of the work tree."""
        path = self.tree / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def commit(self, subject: str, fault: str, trailers: str = TRAILERS) -> None:
        """Commit the work tree's changes as a patch to be."""
        message = f"{subject}\n\nSymptom, cause and fix.\n\n{trailers.format(fault=fault)}"
        dates = {"GIT_AUTHOR_DATE": f"{STAMP} +0000", "GIT_COMMITTER_DATE": f"{STAMP} +0000"}
        git(["add", "--all"], self.tree)
        git(["commit", "--quiet", "--file=-"], self.tree, stdin=message.encode(), env=dates)

    def offer(self, version: str, files: Mapping[str, str] = FILES) -> None:
        """Have pip find another release of toy, of which `files` are what 1.0's would be."""
        own = {name: text.replace("1.0", version) for name, text in files.items()}
        make_sdist(self.links / f"toy-{version}.tar.gz", own, version=version)

    def with_series(self) -> ToyHouse:
        """Two patches: one edits a file, the other an original, its mirror's twin and a new file."""
        self.run("apply", "toy", "1.0")
        self.edit("toy/core.py", "line_20 = 20", "line_20 = 'twenty'")
        self.commit("core: spell twenty", "spelling")
        self.edit("native/op.py", "return 1", "return 2")
        (self.tree / "native" / "new.py").write_text("new = True\n")
        self.commit("native: return two — “quoted”", "native-two")
        self.run("refresh", "toy", "1.0")
        return self


def make_toy(folder: Path, build_env: Path | None = None) -> ToyHouse:
    """A toy house in `folder`; `build_env` is a ready environment to build in, lent by another house."""
    root, links = folder / "house", folder / "links"
    pin = root / "patches" / "toy" / "1.0"
    pin.mkdir(parents=True)
    (root / "tests" / "resume").mkdir(parents=True)
    (root / "tests" / "resume" / "test_toy.py").write_text("")
    (root / "pyproject.toml").write_text('[project]\nname = "carry"\n')
    sha256 = make_sdist(links / "toy-1.0.tar.gz")
    (root / "patches" / "toy" / "upstream.toml").write_text(UPSTREAM)
    write_pin(pin / "pin.toml", sha256)
    if build_env:
        (root / "build" / "cache").mkdir(parents=True)
        (root / "build" / "cache" / "build-env").symlink_to(build_env)
    return ToyHouse(root, links)


def write_pin(path: Path, sha256: str, revision: int = 1, more: str = "") -> None:
    path.write_text(
        textwrap.dedent(f"""\
            version = "1.0"
            sdist = "toy-1.0.tar.gz"
            sha256 = "{sha256}"
            tag = "v1.0"
            revision = {revision}
            stacks = ["toy-stack"]
            {more}""")
    )
