"""The wheels of the real pins, as `make build-wheels` left them; without them these tests fail."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from carry.patches import load_series
from carry.paths import House
from carry.pins import Pin, all_pins
from carry.sources import sdist_path
from carry.wheels import wheel_name
from toyhouse import ToyHouse

ROOT = Path(__file__).resolve().parents[2]
HOUSE = House(ROOT)
PINS = all_pins(HOUSE)
each_pin = pytest.mark.parametrize("pin", PINS, ids=str)


def wheel(pin: Pin, flavour: str) -> Path:
    path = HOUSE.candidate / pin.upstream.index_name / wheel_name(pin, flavour)
    assert path.exists(), f"{path} is not built; run `make build-wheels` first"
    return path


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def shipped(pin: Pin, file: str) -> set[str]:
    """Where a file of the sdist lands in the wheel: itself below the package, and its twin in a mirror."""
    twins = {
        mirror + file[len(original) :]
        for mirror, original in pin.upstream.mirrors.items()
        if file.startswith(original + "/")
    }
    return twins or {file}


@each_pin
def test_patched_minus_pristine_is_exactly_the_series(pin: Pin):
    patched, pristine = contents(wheel(pin, "patched")), contents(wheel(pin, "pristine"))
    local = f"{pin.version}+resume.{pin.revision}"
    renamed = {name.replace(f"{pin.version}+pristine", local): content for name, content in pristine.items()}
    differ = {name for name in patched.keys() | renamed.keys() if patched.get(name) != renamed.get(name)}
    info = f"{pin.upstream.file_name}-{local}.dist-info"
    series = load_series(pin)
    files = {place for patch in series for file in patch.files for place in shipped(pin, file)}
    provenance = {f"{info}/METADATA", f"{info}/RECORD", f"{info}/carry.json", *pin.upstream.generated}
    assert differ == files | provenance
    # Version and provenance differ, and in those files nothing else does.
    old, new = b"+pristine", f"+resume.{pin.revision}".encode()
    for name in (f"{info}/METADATA", *pin.upstream.generated):
        assert patched[name] == renamed[name].replace(old, new), name


@each_pin
def test_pristine_is_the_sdist(pin: Pin):
    """Every module in the pristine wheel is the sdist's, but for the version line of the generated file."""
    import tarfile

    ours = contents(wheel(pin, "pristine"))
    with tarfile.open(sdist_path(HOUSE, pin)) as archive:
        top = f"{pin.upstream.file_name}-{pin.version}/"
        files = {m.name.removeprefix(top): archive.extractfile(m).read() for m in archive if m.isfile()}
    package = {name for name in ours if name.startswith(pin.upstream.import_name + "/")}
    modules = {name for name in files if name.startswith(pin.upstream.import_name + "/") and name.endswith(".py")}
    assert modules - package == set(), "modules of the sdist that the wheel lacks"
    assert {name for name in package if ours[name] != files.get(name)} == set(pin.upstream.generated)


@each_pin
def test_the_wheel_fixes_what_its_series_says_and_is_what_dist_holds(pin: Pin):
    path = wheel(pin, "patched")
    info = json.loads(
        contents(path)[f"{pin.upstream.file_name}-{pin.version}+resume.{pin.revision}.dist-info/carry.json"]
    )
    assert info["faults"] == [patch.fault for patch in load_series(pin)]
    assert (HOUSE.wheels / path.name).read_bytes() == path.read_bytes()


@each_pin
def test_a_build_in_another_folder_gives_the_same_bytes(pin: Pin, tmp_path: Path, build_env: Path):
    """With another folder, TMPDIR, umask and an environment that upstream's setup.py would listen to."""
    root = tmp_path / "elsewhere"
    shutil.copytree(
        ROOT / "patches" / pin.upstream.name / pin.version, root / "patches" / pin.upstream.name / pin.version
    )
    shutil.copy(pin.upstream.folder / "upstream.toml", root / "patches" / pin.upstream.name)
    cache = root / "build" / "cache"
    cache.mkdir(parents=True)
    (cache / "build-env").symlink_to(build_env)
    (tmp_path / "tmp").mkdir()
    surroundings = {
        "TMPDIR": str(tmp_path / "tmp"),
        "TZ": "Asia/Tokyo",
        "CC": "/bin/false",
        "CUDA_HOME": "/opt/cuda",
        "DS_BUILD_OPS": "1",
        "DS_ACCELERATOR": "cuda",
        "PYTHONHASHSEED": "7",
        "SOURCE_DATE_EPOCH": "5",
    }
    old = os.umask(0o077)
    try:
        ToyHouse(root, sdist_path(HOUSE, pin).parent).run("build-wheels", **surroundings)
    finally:
        os.umask(old)
    for flavour in ("patched", "pristine"):
        here, there = (
            wheel(pin, flavour),
            root / "build/candidate/simple" / pin.upstream.index_name / wheel_name(pin, flavour),
        )
        assert sha256(there) == sha256(here), flavour


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
