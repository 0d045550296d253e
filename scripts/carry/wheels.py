"""Wheels: built from a release with or without its series, the same bytes every time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from carry.errors import CouldNotRun, UserError
from carry.paths import House
from carry.patches import Patch, apply_series, load_series, series_sha256
from carry.pins import Pin
from carry.progress import say
from carry.sources import file_sha256
from carry.trees import changed_files, lay
from carry.wheelfile import rewrite

FLAVOURS = ("patched", "pristine")
# Part of every wheel's inputs: raise it when the way wheels are made changes their bytes.
BUILDER = 1
_PINS = Path(__file__).with_name("build-pins.txt")
_DISK_FULL = ("no space left on device", "disk quota exceeded", "os error 28", "file too large")


@dataclass(frozen=True)
class Wheel:
    """A built wheel in the cache; `built` tells whether this run built it."""

    pin: Pin
    flavour: str
    path: Path
    sha256: str
    built: bool


def local_version(pin: Pin, flavour: str) -> str:
    """The local version: resume.<revision> patched, or pristine."""
    return f"resume.{pin.revision}" if flavour == "patched" else "pristine"


def wheel_name(pin: Pin, flavour: str) -> str:
    """The wheel's file name, such as deepspeed-0.19.8+resume.1-py3-none-any.whl."""
    return f"{pin.upstream.file_name}-{pin.version}+{local_version(pin, flavour)}-py3-none-any.whl"


def build_all(house: House, pins: Iterable[Pin]) -> list[Wheel]:
    """Every pin's patched and pristine wheel; one whose inputs did not change is not built again.

    Patched wheels also lie in dist/wheels, where older revisions of the same pins are removed.
    Raises as `build`.
    """
    wheels = []
    for pin in pins:
        series = load_series(pin)
        for flavour in FLAVOURS:
            wheels.append(build(house, pin, series if flavour == "patched" else (), flavour))
    for wheel in wheels:
        if wheel.flavour == "patched":
            _publish(wheel.path, house.wheels / wheel.path.name, wheel.sha256)
    return wheels


def build(house: House, pin: Pin, series: Sequence[Patch], flavour: str) -> Wheel:
    """The wheel of `pin` with `series`, from the cache where its inputs are known.

    Raises UserError where the series does not apply or the build fails because of
    it, CouldNotRun where the surroundings fail.
    """
    key = inputs_sha256(pin, series, flavour)
    folder = house.cache / "wheels" / key
    path = folder / wheel_name(pin, flavour)
    digest = _recorded(path)
    if digest:
        return Wheel(pin, flavour, path, digest, built=False)
    applied = apply_series(house, pin, series)
    changed = changed_files(applied.release, applied.release.tree, applied.tree)
    say(f"building {path.name} ({len(series)} patches, {len(changed)} files changed)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".build-", ignore_cleanup_errors=True) as scratch:
        work = Path(scratch)
        lay(applied.release, applied.tree, work / "tree")
        generated = {
            file: ((work / "tree" / file).read_bytes(), starts)
            for file, starts in pin.upstream.generated.items()
            if (work / "tree" / file).exists()
        }
        raw = _run_build(house, pin, flavour, work, applied.release.epoch)
        (work / "done").mkdir()
        made = work / "done" / path.name
        rewrite(raw, made, applied.release.epoch, {"carry.json": _json(provenance(pin, series, flavour))}, generated)
        digest = file_sha256(made)
        (work / "done" / "sha256").write_text(digest + "\n")
        os.replace(work / "done", folder)
    return Wheel(pin, flavour, path, digest, built=True)


def inputs_sha256(pin: Pin, series: Sequence[Patch], flavour: str) -> str:
    """Hash of everything that decides a wheel's bytes."""
    inputs = {
        "builder": BUILDER,
        "build_pins": hashlib.sha256(_PINS.read_bytes()).hexdigest(),
        "upstream": hashlib.sha256((pin.upstream.folder / "upstream.toml").read_bytes()).hexdigest(),
        "provenance": provenance(pin, series, flavour),
    }
    return hashlib.sha256(_json(inputs)).hexdigest()


def provenance(pin: Pin, series: Sequence[Patch], flavour: str) -> dict:
    """What carry.json in the wheel's dist-info says."""
    return {
        "schema": 1,
        "upstream": pin.upstream.name,
        "version": pin.version,
        "flavour": flavour,
        "revision": pin.revision,
        "variant": "pure",
        "sdist": {"file": pin.sdist, "sha256": pin.sha256},
        "tag": pin.tag,
        "commit": pin.commit,
        "series_sha256": series_sha256(series),
        "faults": [patch.fault for patch in series],
        "patches": [
            {"file": patch.path.name, "sha256": patch.sha256, "fault": patch.fault} for patch in series
        ],
    }


def _recorded(path: Path) -> str | None:
    """The wheel's sha256 where the file in the cache still has the recorded one."""
    try:
        digest = path.with_name("sha256").read_text().strip()
        return digest if file_sha256(path) == digest else None
    except FileNotFoundError:
        return None


def _publish(wheel: Path, dest: Path, digest: str) -> None:
    project, version, _ = wheel.name.split("-", 2)
    dest.parent.mkdir(parents=True, exist_ok=True)
    for other in dest.parent.glob(f"{project}-{version.partition('+')[0]}+resume.*.whl"):
        if other.name != dest.name:
            other.unlink()
    if dest.exists() and file_sha256(dest) == digest:
        return
    beside = dest.with_name(f".{dest.name}.new")
    shutil.copyfile(wheel, beside)
    os.replace(beside, dest)


def _json(data: dict) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _run_build(house: House, pin: Pin, flavour: str, work: Path, epoch: int) -> Path:
    python = build_python(house)
    env = _base_env(work) | {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SOURCE_DATE_EPOCH": str(epoch),
        **{key: text.replace("{local}", local_version(pin, flavour))
           for key, text in pin.upstream.wheel_env.items()},
    }  # fmt: skip
    out = work / "out"
    args = ["build", "--wheel", "--no-build-isolation", "--no-config", "--python", str(python), "--out-dir", str(out),
            str(work / "tree")]  # fmt: skip
    log = _uv(args, env, f"building {wheel_name(pin, flavour)}", house, work)
    found = list(out.glob("*.whl"))
    if [path.name for path in found] != [wheel_name(pin, flavour)]:
        names = ", ".join(path.name for path in found) or "nothing"
        raise UserError(f"the build of {pin} gave {names}, not {wheel_name(pin, flavour)}; see {log}")
    return found[0]


def build_python(house: House) -> Path:
    """The interpreter of the environment wheels are built in: pinned setuptools and wheel, nothing else."""
    import sys

    version = ".".join(map(str, sys.version_info[:3]))
    key = hashlib.sha256(_PINS.read_bytes() + f"{version} {sys.base_prefix}".encode()).hexdigest()[:16]
    folder = house.cache / "build-env" / key
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    say("making the environment that wheels are built in")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A virtual environment cannot be renamed, so a mark written last says that it is whole.
    env = {**os.environ, "UV_NO_PROGRESS": "1", **pip_places()}
    _uv(["venv", "--quiet", "--no-config", "--python", sys.executable, str(folder)], env, "uv venv", house)
    _uv(["pip", "install", "--quiet", "--no-config", "--python", str(python), "--require-hashes", "--no-deps",
         "--only-binary=:all:", "-r", str(_PINS)], env, "installing build-pins.txt", house)  # fmt: skip
    (folder / "ready").touch()
    return python


def pip_places() -> dict[str, str]:
    """uv's variables for where pip is configured to look; what the user set for uv itself wins."""
    from carry.download import pip_config

    config = pip_config()
    env = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    if config.indexes:
        env["UV_DEFAULT_INDEX"] = config.indexes[0]
        env["UV_INDEX"] = " ".join(config.indexes[1:])
    else:
        env["UV_NO_INDEX"] = "1"
    env["UV_FIND_LINKS"] = ",".join(config.find_links)
    if config.cert:
        env["SSL_CERT_FILE"] = config.cert
    return {key: value for key, value in env.items() if value and key not in os.environ}


def _base_env(work: Path) -> dict[str, str]:
    """Nothing of the caller's environment: no compiler, no accelerator, no locale of theirs."""
    temp = work / "tmp"
    temp.mkdir()
    return {"HOME": str(temp), "TMPDIR": str(temp), "LC_ALL": "C.UTF-8", "TZ": "UTC", "UV_NO_CACHE": "1",
            "UV_OFFLINE": "1", "UV_NO_PROGRESS": "1"}  # fmt: skip


def _uv(args: Sequence[str], env: dict[str, str], what: str, house: House, work: Path | None = None) -> str:
    """Run uv under umask 022; returns the shown path of its log. Raises CouldNotRun, or UserError for a
    build."""
    from uv import find_uv_bin

    log = house.build / "logs" / f"{what.replace(' ', '-').replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as handle:
        done = subprocess.run([find_uv_bin(), *args], env=env, stdin=subprocess.DEVNULL, stdout=handle,
                              stderr=subprocess.STDOUT, umask=0o022)  # fmt: skip
    shown = house.relative(log)
    if done.returncode:
        text = log.read_text(encoding="utf-8", errors="replace")
        if any(words in text.lower() for words in _DISK_FULL):
            raise CouldNotRun(f"no space left while {what}; free some and run again")
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
        kind = UserError if work else CouldNotRun
        raise kind(f"{what} failed: {last[:200]}; see {shown}")
    return shown
