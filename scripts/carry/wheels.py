"""Wheels: built from a release with or without its series, the same bytes every time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from carry.buildenv import BUILD_PINS, build_python, run_uv
from carry.envs import Env
from carry.errors import UserError
from carry.patches import Patch, apply_series, load_series, series_sha256
from carry.paths import House
from carry.pins import Pin
from carry.progress import say
from carry.sources import file_sha256
from carry.trees import changed_files, lay
from carry.wheelfile import rewrite

FLAVOURS = ("patched", "pristine")
# Part of every wheel's inputs: raise it when the way wheels are made changes their bytes.
BUILDER = 1
_KEPT = 20


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
    _prune(house.cache / "wheels", {wheel.path.parent for wheel in wheels})
    return wheels


def build(house: House, pin: Pin, series: Sequence[Patch], flavour: str, env: Env | None = None) -> Wheel:
    """The wheel of `pin` with `series`, from the cache where its inputs are known.

    `env` is the stack to build in, for a release whose setup.py cannot do without torch: good enough to be tested,
    but not the same bytes everywhere. Raises UserError where the series does not apply or the build fails because of
    it, CouldNotRun where the surroundings fail.
    """
    path = _cached(house, pin, series, flavour, env)
    folder = path.parent
    digest = _recorded(path)
    if digest:
        return Wheel(pin, flavour, path, digest, built=False)
    carry_json = _checked_provenance(pin, series, flavour)
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
        _write_lines(pin, flavour, work / "tree")
        python = env.python if env else build_python(house)
        raw = _run_build(house, pin, flavour, work, applied.release.epoch, python)
        (work / "done").mkdir()
        made = work / "done" / path.name
        rewrite(
            raw,
            made,
            applied.release.epoch,
            {"carry.json": carry_json},
            generated,
        )
        digest = file_sha256(made)
        (work / "done" / "sha256").write_text(digest + "\n")
        os.replace(work / "done", folder)
    return Wheel(pin, flavour, path, digest, built=True)


def cached_wheels(house: House, built: Sequence[Wheel]) -> list[Path]:
    """Files for the candidate index: those just asked for, and what is current of every other pin."""
    from carry.pins import all_pins

    paths = {wheel.path.name: wheel.path for wheel in built}
    for pin in all_pins(house):
        if any(wheel.pin == pin for wheel in built):
            continue
        series = load_series(pin)
        for flavour in FLAVOURS:
            path = _cached(house, pin, series if flavour == "patched" else (), flavour)
            if _recorded(path):
                paths[path.name] = path
    return [paths[name] for name in sorted(paths)]


def _cached(house: House, pin: Pin, series: Sequence[Patch], flavour: str, env: Env | None = None) -> Path:
    inputs = inputs_sha256(pin, series, flavour)
    folder = f"{inputs}-{env.stack.sha256[:16]}" if env else inputs
    return house.cache / "wheels" / folder / wheel_name(pin, flavour)


def inputs_sha256(pin: Pin, series: Sequence[Patch], flavour: str) -> str:
    """Hash of everything that decides a wheel's bytes."""
    inputs = {
        "builder": BUILDER,
        "build_pins": hashlib.sha256(BUILD_PINS.read_bytes()).hexdigest(),
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
        "patches": [{"file": patch.path.name, "sha256": patch.sha256, "fault": patch.fault} for patch in series],
    }


def _checked_provenance(pin: Pin, series: Sequence[Patch], flavour: str) -> bytes:
    from carry.schema import fault_in

    document = provenance(pin, series, flavour)
    if wrong := fault_in(document, "provenance"):
        raise UserError(f"{pin}: the wheel's carry.json would be malformed at {wrong}; run `carry lint`")
    return _json(document)


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


def _prune(folder: Path, used: set[Path]) -> None:
    """Forget all but the newest builds that this run did not ask for: each is megabytes."""
    others = [path for path in folder.iterdir() if path not in used] if folder.exists() else []
    for path in sorted(others, key=lambda path: path.stat().st_mtime)[:-_KEPT]:
        shutil.rmtree(path)


def _json(data: dict) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _write_lines(pin: Pin, flavour: str, tree: Path) -> None:
    """Put the lines of [wheel.lines] in place: for upstreams whose version is in a file, not in the environment."""
    for file, lines in pin.upstream.lines.items():
        path = tree / file
        content = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for start, text in lines.items():
            places = [number for number, line in enumerate(content) if line.startswith(start)]
            if len(places) != 1:
                raise UserError(
                    f"{pin}: {len(places)} lines of {file} begin with {start!r}, not one; "
                    f"correct [wheel.lines] in patches/{pin.upstream.name}/upstream.toml"
                )
            content[places[0]] = text.replace("{local}", local_version(pin, flavour)) + "\n"
        path.write_text("".join(content), encoding="utf-8")


def _run_build(house: House, pin: Pin, flavour: str, work: Path, epoch: int, python: Path) -> Path:
    env = _base_env(work) | {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SOURCE_DATE_EPOCH": str(epoch),
        **{key: text.replace("{local}", local_version(pin, flavour)) for key, text in pin.upstream.wheel_env.items()},
    }
    out = work / "out"
    args = [
        "build",
        "--wheel",
        "--no-build-isolation",
        "--no-config",
        "--python",
        str(python),
        "--out-dir",
        str(out),
        str(work / "tree"),
    ]
    log = run_uv(args, env, f"building {wheel_name(pin, flavour)}", house, work)
    found = list(out.glob("*.whl"))
    if [path.name for path in found] != [wheel_name(pin, flavour)]:
        names = ", ".join(path.name for path in found) or "nothing"
        raise UserError(f"the build of {pin} gave {names}, not {wheel_name(pin, flavour)}; see {log}")
    return found[0]


def _base_env(work: Path) -> dict[str, str]:
    """Nothing of the caller's environment: no compiler, no accelerator, no locale of theirs."""
    temp = work / "tmp"
    temp.mkdir()
    return {
        "HOME": str(temp),
        "TMPDIR": str(temp),
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "UV_NO_CACHE": "1",
        "UV_OFFLINE": "1",
        "UV_NO_PROGRESS": "1",
    }
