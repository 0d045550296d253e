import dataclasses
import hashlib
import importlib.metadata
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from carry.patches import load_series, series_sha256
from carry.wheelfile import merge_lines, sort_requirements
from carry.wheels import inputs_sha256, wheel_name
from toyhouse import STAMP, ToyHouse, make_toy, write_pin

PATCHED, PRISTINE = "toy-1.0+resume.1-py3-none-any.whl", "toy-1.0+pristine-py3-none-any.whl"


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory, build_env: Path) -> ToyHouse:
    toy = make_toy(tmp_path_factory.mktemp("built"), build_env).with_series()
    done = toy.run("build-wheels")
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["built", PATCHED],
        ["built", PRISTINE],
    ]
    return toy


@pytest.fixture
def built(tmp_path: Path, _built: ToyHouse) -> ToyHouse:
    """A toy house with its series and both wheels."""
    shutil.copytree(_built.root.parent, tmp_path, dirs_exist_ok=True, symlinks=True)
    return ToyHouse(tmp_path / "house", tmp_path / "links")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def wheels(toy: ToyHouse) -> dict[str, Path]:
    return {path.name: path for path in (toy.root / "build" / "candidate" / "simple" / "toy").glob("*.whl")}


def test_patched_minus_pristine_is_the_series_the_version_and_the_provenance(built: ToyHouse):
    patched, pristine = (contents(wheels(built)[name]) for name in (PATCHED, PRISTINE))
    renamed = {name.replace("+pristine", "+resume.1"): content for name, content in pristine.items()}
    differ = {name for name in patched.keys() | renamed.keys() if patched.get(name) != renamed.get(name)}
    info = "toy-1.0+resume.1.dist-info"
    assert differ == {
        "toy/core.py",
        "toy/native/op.py",
        "toy/native/new.py",  # a new file of the series
        "toy/built.py",
        f"{info}/METADATA",
        f"{info}/RECORD",
        f"{info}/carry.json",
    }
    assert patched["toy/built.py"] == b"version='1.0+resume.1'\ncompiler='upstream'\nhost='upstream'\n"
    assert patched[f"{info}/METADATA"] == renamed[f"{info}/METADATA"].replace(b"+pristine", b"+resume.1")


def test_the_wheel_says_what_it_is(built: ToyHouse):
    info = json.loads(contents(wheels(built)[PATCHED])["toy-1.0+resume.1.dist-info/carry.json"])
    series = load_series(built.pin)
    assert info == {
        "schema": 1,
        "upstream": "toy",
        "version": "1.0",
        "flavour": "patched",
        "revision": 1,
        "variant": "pure",
        "sdist": {"file": "toy-1.0.tar.gz", "sha256": built.pin.sha256},
        "tag": "v1.0",
        "commit": None,
        "series_sha256": series_sha256(series),
        "faults": ["spelling", "native-two"],
        "patches": [
            {"file": name, "sha256": hashlib.sha256(content).hexdigest(), "fault": fault}
            for (name, content), fault in zip(built.patches().items(), ("spelling", "native-two"), strict=True)
        ],
    }
    pristine = json.loads(contents(wheels(built)[PRISTINE])["toy-1.0+pristine.dist-info/carry.json"])
    assert (pristine["flavour"], pristine["faults"], pristine["patches"]) == ("pristine", [], [])
    assert pristine["series_sha256"] == series_sha256(())


def test_an_installed_wheel_tells_its_faults_and_its_record_is_right(built: ToyHouse, tmp_path: Path):
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site),
         str(built.root / "dist" / "wheels" / PATCHED)], check=True, env=built.environment())  # fmt: skip
    (found,) = importlib.metadata.distributions(path=[str(site)])
    assert json.loads(found.read_text("carry.json"))["faults"] == ["spelling", "native-two"]
    assert found.version == "1.0+resume.1"
    for file in contents(built.root / "dist" / "wheels" / PATCHED):
        if ".data/" not in file and not file.endswith("RECORD"):
            entry = next(entry for entry in found.files if str(entry) == file)
            assert entry.size == (site / file).stat().st_size, file


def test_order_times_and_permissions_are_fixed(built: ToyHouse):
    with zipfile.ZipFile(wheels(built)[PATCHED]) as archive:
        infos = archive.infolist()
    info = "toy-1.0+resume.1.dist-info"
    names = [entry.filename for entry in infos]
    assert names == sorted(names, key=lambda name: (name.startswith(info), name.endswith("/RECORD"), name))
    assert {entry.date_time for entry in infos} == {time.gmtime(STAMP)[:6]}
    modes = {entry.filename: stat.S_IMODE(entry.external_attr >> 16) for entry in infos}
    script = "toy-1.0+resume.1.data/scripts/toy"
    assert modes.pop(script) == 0o755
    assert set(modes.values()) == {0o644}


def test_the_same_inputs_give_the_same_bytes_elsewhere(built: ToyHouse, tmp_path: Path, build_env: Path):
    """Another folder, TMPDIR, umask, locale, hash seed, compiler, and settings meant for other builds."""
    other = make_toy(tmp_path / "a" / "much longer name", build_env)
    other = dataclasses.replace(other, links=built.links)  # pip's own settings split at spaces
    for name, content in built.patches().items():
        (other.folder / name).write_bytes(content)
    (tmp_path / "tmp").mkdir()
    surroundings = {
        "TMPDIR": str(tmp_path / "tmp"),
        "LC_ALL": "C",
        "TZ": "Asia/Tokyo",
        "CC": "/opt/cc",
        "PYTHONHASHSEED": "7",
        "SOURCE_DATE_EPOCH": "5",
        "TOY_LOCAL": "+stray",
    }
    old = os.umask(0o077)
    try:
        other.run("build-wheels", **surroundings)
    finally:
        os.umask(old)
    for name in (PATCHED, PRISTINE):
        assert wheels(other)[name].read_bytes() == wheels(built)[name].read_bytes(), name


def test_nothing_is_built_twice_and_git_and_uv_stay_asleep(built: ToyHouse, tmp_path: Path):
    before = {path: path.stat().st_mtime_ns for path in (*wheels(built).values(), built.root / "dist/wheels" / PATCHED)}
    (tmp_path / "empty").mkdir()
    (built.links / "toy-1.0.tar.gz").unlink()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = built.run("build-wheels", PATH=str(tmp_path / "empty"))
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr == ""
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["unchanged", PATCHED],
        ["unchanged", PRISTINE],
    ]
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime < 1


def test_what_is_lost_from_the_outputs_comes_back_from_the_cache(built: ToyHouse):
    whole = (built.root / "dist" / "wheels" / PATCHED).read_bytes()
    (built.root / "dist" / "wheels" / PATCHED).write_bytes(b"damaged")
    shutil.rmtree(built.root / "build" / "candidate")
    assert "built " not in built.run("build-wheels").stdout
    assert (built.root / "dist" / "wheels" / PATCHED).read_bytes() == whole
    assert set(wheels(built)) == {PATCHED, PRISTINE}


def test_a_damaged_wheel_in_the_cache_is_built_again(built: ToyHouse):
    (cached,) = (built.root / "build" / "cache" / "wheels").glob(f"*/{PATCHED}")
    good = cached.read_bytes()
    cached.write_bytes(good[:-1])
    assert built.run("build-wheels").stdout.startswith("built ")
    assert cached.read_bytes() == good


def test_a_new_revision_replaces_the_wheel_of_the_old(built: ToyHouse):
    write_pin(built.pin_file, built.pin.sha256, revision=2)
    built.run("build-wheels")
    assert [path.name for path in (built.root / "dist" / "wheels").iterdir()] == [
        PATCHED.replace("resume.1", "resume.2")
    ]
    assert set(wheels(built)) == {PATCHED.replace("resume.1", "resume.2"), PRISTINE}


def test_every_input_counts(built: ToyHouse):
    def key() -> str:
        return inputs_sha256(built.pin, load_series(built.pin), "patched")

    keys = {key(), inputs_sha256(built.pin, load_series(built.pin), "pristine")}
    write_pin(built.pin_file, built.pin.sha256, revision=2)
    keys.add(key())
    write_pin(built.pin_file, "1" * 64, revision=2)
    keys.add(key())
    first = sorted(built.folder.glob("*.patch"))[0]
    first.write_bytes(first.read_bytes() + b"\n")
    keys.add(key())
    upstream = built.folder.parent / "upstream.toml"
    upstream.write_text(upstream.read_text().replace("TOY_LOCAL", "OTHER"))
    keys.add(key())
    assert len(keys) == 6


def test_a_setup_that_fails_is_one_line_with_its_log(builder: ToyHouse):
    builder.run("apply", "toy", "1.0")
    builder.edit("setup.py", "from setuptools import setup", "raise SystemExit('no toys today')")
    builder.commit("setup: fail", "setup-fails")
    builder.run("refresh", "toy", "1.0")
    done = builder.run("build-wheels", check=1)
    last = done.stderr.splitlines()[-1]
    log = last.rpartition("see ")[2]
    assert last.startswith(f"carry: building {PATCHED} failed: ")
    assert "no toys today" in (builder.root / log).read_text()
    assert not (builder.root / "dist").exists()


def test_a_wheel_with_another_version_is_refused(builder: ToyHouse):
    upstream = builder.folder.parent / "upstream.toml"
    upstream.write_text(upstream.read_text().replace("TOY_LOCAL", "OTHER"))
    done = builder.run("build-wheels", check=1)
    assert f"gave toy-1.0-py3-none-any.whl, not {PATCHED}; see build/logs/" in done.stderr


def test_names(built: ToyHouse):
    assert [wheel_name(built.pin, flavour) for flavour in ("patched", "pristine")] == [PATCHED, PRISTINE]


def test_requirements_are_sorted_and_the_description_is_not():
    body = b"\n\nRequires-Dist: z\nRequires-Dist: y\n"
    text = b"Name: x\nRequires-Dist: b\nProvides-Extra: e\nRequires-Dist: a" + body
    assert sort_requirements(text) == (b"Name: x\nRequires-Dist: a\nProvides-Extra: e\nRequires-Dist: b" + body)


def test_published_lines_stay_but_for_ours():
    published, built = b"version='1 '\ncc=True\n", b"version='1+x'\ncc=False\nnew=1\n"
    assert merge_lines("f", published, built, ("version=",)) == b"version='1+x'\ncc=True\n"


def test_lines_of_the_source_are_ours_during_the_build(toy: ToyHouse):
    path = toy.folder.parent / "upstream.toml"
    path.write_text(path.read_text() + '[wheel.lines]\n"toy/core.py" = { "line_3 = " = "line_3 = \'{local}\'" }\n')
    toy.run("build-wheels")
    for name, local in ((PATCHED, b"resume.1"), (PRISTINE, b"pristine")):
        lines = contents(wheels(toy)[name])["toy/core.py"].splitlines()
        assert lines[1:4] == [b"line_2 = 2", b"line_3 = '" + local + b"'", b"line_4 = 4"]


def test_a_line_that_is_not_there_is_refused(toy: ToyHouse):
    path = toy.folder.parent / "upstream.toml"
    path.write_text(path.read_text() + '[wheel.lines]\n"toy/core.py" = { "line_" = "" }\n')
    done = toy.run("build-wheels", check=1)
    assert "40 lines of toy/core.py begin with 'line_', not one" in done.stderr
