"""Stacks and site folders: locked, whole or not at all, and errors in one line. Offline."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from carry import doctor, envs
from carry.errors import UserError
from carry.index import write_index
from carry.paths import House
from wheelmaker import make_wheel

STACKS = Path(__file__).parents[2] / "ci" / "stacks"
LOCKS = sorted(STACKS.glob("*.txt"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_locked_package_is_exact_and_hashed_and_no_index_is_named(lock):
    text = lock.read_text()
    blocks = re.findall(r"^[a-z0-9].*?(?=^[a-z0-9#]|\Z)", text, re.S | re.M)
    assert blocks
    for block in blocks:
        assert re.match(r"[a-z0-9-]+==[\w.+]+ ", block), block
        assert "--hash=sha256:" in block, block
    assert "://" not in text and "--index" not in text


@pytest.mark.parametrize("lock", [p for p in LOCKS if not p.name.endswith(".cuda.txt")], ids=lambda path: path.name)
def test_every_lock_says_for_which_pythons_it_is(lock):
    assert re.match(r"# python: >=3\.\d+,<3\.\d+\n", lock.read_text())


@pytest.mark.parametrize(("minor", "fits"), [(9, False), (10, True), (12, True), (13, False), (14, False)])
def test_a_stack_that_is_not_for_this_python_is_one_line_and_installs_nothing(tmp_path, monkeypatch, minor, fits):
    house = House(tmp_path)
    house.stacks.mkdir(parents=True)
    (house.stacks / "s.txt").write_text("# python: >=3.10,<3.13\ntorch==1.0 --hash=sha256:00\n")
    fake = SimpleNamespace(version_info=(3, minor, 1), base_prefix=sys.base_prefix, executable=sys.executable)
    monkeypatch.setattr(envs, "sys", fake)
    monkeypatch.setattr(envs, "run_uv", lambda *args: pytest.fail("uv was run") if not fits else 1 / 0)
    monkeypatch.setattr(envs, "pip_places", dict)
    said = f"stack s needs Python >=3.10,<3.13 and this is 3.{minor}; run `make PYTHON=python3.12 …`"
    with pytest.raises(ZeroDivisionError if fits else envs.CouldNotRun, match=None if fits else re.escape(said)):
        envs.install_stack(house, "s")
    check = doctor._stacks(house)
    assert (check.name, check.ok, check.seen) == ("stacks", fits, "this Python will do for s" if fits else said)


def test_a_range_that_is_none_is_an_error(tmp_path):
    (tmp_path / "s.txt").write_text("# python: 3.10 or so\n")
    with pytest.raises(UserError, match=r"ci/stacks/s.txt:1: '3.10 or so' is no range; write it as"):
        envs.python_misfit(tmp_path / "s.txt")
    (tmp_path / "s.txt").write_text("torch==1.0\n")
    assert envs.python_misfit(tmp_path / "s.txt") is None


def test_an_unknown_stack_names_those_there_are(tmp_path):
    house = House(tmp_path)
    house.stacks.mkdir(parents=True)
    (house.stacks / "a-cpu.txt").touch()
    (house.stacks / "a-cpu.cuda.txt").touch()
    with pytest.raises(UserError, match=r"no stack 'b' in ci/stacks/; there is: a-cpu$"):
        envs.load_stack(house, "b")


def test_a_stacks_hash_follows_each_of_its_files(tmp_path):
    house = House(tmp_path)
    house.stacks.mkdir(parents=True)
    lock, cuda = house.stacks / "a.txt", house.stacks / "a.cuda.txt"
    lock.write_text("x==1")
    seen = {envs.load_stack(house, "a").sha256}
    cuda.write_text("y==1")
    seen.add(envs.load_stack(house, "a").sha256)
    lock.write_text("x==2")
    seen.add(envs.load_stack(house, "a").sha256)
    assert len(seen) == 3


def test_a_local_build_is_locked_by_its_own_name_only_when_its_hash_is_listed(tmp_path):
    wheel = make_wheel(tmp_path / "links", name="torch", version="2.13.0+cpu")
    digest = envs.file_sha256(wheel)
    lock = "torch==2.13.0 \\\n    --hash=sha256:{}\ntorchvision==2.13.0 \\\n    --hash=sha256:00\n"
    folders = [str(wheel.parent), ""]
    assert envs.with_local_builds(lock.format(digest), folders).startswith("torch==2.13.0+cpu \\\n")
    assert "torchvision==2.13.0 " in envs.with_local_builds(lock.format(digest), folders)
    assert envs.with_local_builds(lock.format("11"), folders) == lock.format("11")
    assert envs.with_local_builds(lock.format(digest), []) == lock.format(digest)


@pytest.fixture
def house(tmp_path):
    house = House(tmp_path)
    wheel = make_wheel(tmp_path / "inbox", version="1.0+resume.1", body="answer = 42\n")
    write_index([wheel], house.candidate)
    return house, wheel


def env():
    stack = envs.Stack("s", Path("s.txt"), Path("s.cuda.txt"), Path("s.extra.toml"), "0" * 64)
    return envs.Env(stack, Path(sys.executable), "3", "2")


def test_a_site_holds_the_wheel_installed_by_hash(house):
    house, wheel = house
    folder = envs.site(house, env(), wheel.name, envs.file_sha256(wheel))
    assert (folder / "demo" / "__init__.py").read_text().endswith("answer = 42\n")
    with zipfile.ZipFile(wheel) as archive:
        assert all((folder / name).is_file() for name in archive.namelist())
    mark = folder.stat().st_ino
    assert envs.site(house, env(), wheel.name, envs.file_sha256(wheel)).stat().st_ino == mark


def test_a_wrong_hash_installs_nothing_and_keeps_the_old_site(house):
    house, wheel = house
    good = envs.site(house, env(), wheel.name, envs.file_sha256(wheel))
    with pytest.raises(envs.CouldNotRun, match=re.escape(f"installing {wheel.name} failed")):
        envs.site(house, env(), wheel.name, "1" * 64)
    assert (good / "demo" / "__init__.py").exists()
    assert [p.name for p in good.parent.iterdir()] == [good.name]


def test_a_wheel_that_is_not_built_says_what_to_run(tmp_path):
    with pytest.raises(UserError, match=r"demo-2.0-py3-none-any.whl is not in .*; run `make build-wheels`"):
        envs.site(House(tmp_path), env(), "demo-2.0-py3-none-any.whl", "0" * 64)


def test_an_interrupted_stack_is_made_anew_and_a_whole_one_is_kept(tmp_path, monkeypatch):
    house = House(tmp_path)
    house.stacks.mkdir(parents=True)
    (house.stacks / "s.txt").write_text("torch==1.0 --hash=sha256:00\n")
    calls = []

    def run_uv(args, env, what, house):
        calls.append(what)
        folder = house.build / "envs" / "s"
        if what == "uv venv":
            (folder / "lib" / "python3" / "site-packages" / "torch-1.0.dist-info").mkdir(parents=True)
        elif len(calls) == 2:
            raise KeyboardInterrupt
        else:
            (info,) = folder.glob("lib/*/*/torch-1.0.dist-info")
            (info / "METADATA").write_text("Name: torch\nVersion: 1.0\n")

    monkeypatch.setattr(envs, "run_uv", run_uv)
    monkeypatch.setattr(envs, "pip_places", dict)
    with pytest.raises(KeyboardInterrupt):
        envs.install_stack(house, "s")
    left = house.build / "envs" / "s" / "left-over"
    left.touch()
    assert envs.install_stack(house, "s").torch == "1.0"
    assert not left.exists()
    assert calls == ["uv venv", "installing s.txt"] * 2
    envs.install_stack(house, "s")
    assert len(calls) == 4
    (house.stacks / "s.txt").write_text("torch==1.0 --hash=sha256:11\n")
    envs.install_stack(house, "s")
    assert len(calls) == 6
