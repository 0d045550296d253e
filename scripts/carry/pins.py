"""Upstreams and the releases of them that we carry patches for."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carry.errors import UserError
from carry.paths import House

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Upstream:
    """What holds for every release of a project, from its upstream.toml."""

    name: str  # of its folder in patches/, and in messages
    index_name: str
    import_name: str
    repository: str
    newest: str
    mirrors: Mapping[str, str]  # mirror folder -> original folder
    wheel_env: Mapping[str, str]
    generated: Mapping[str, tuple[str, ...]]  # file -> beginnings of the lines that are ours
    lines: Mapping[str, Mapping[str, str]]  # file -> beginning of a line -> what the build reads in its place
    folder: Path

    @property
    def file_name(self) -> str:
        """The name as wheel and sdist file names spell it."""
        return re.sub(r"[-_.]+", "_", self.index_name).lower()


@dataclass(frozen=True)
class Pin:
    """One release we carry patches for, from its pin.toml."""

    upstream: Upstream
    version: str
    sdist: str
    sha256: str
    tag: str
    commit: str | None
    revision: int
    stacks: tuple[str, ...]
    folder: Path = field(compare=False)
    published: str | None = None  # sha256 of upstream's own wheel, which our pristine one must equal

    def __str__(self) -> str:
        return f"{self.upstream.name} {self.version}"


# key -> (type, required)
_UPSTREAM_SHAPE = {
    "name": (str, True),
    "import": (str, True),
    "repository": (str, False),
    "newest": (str, False),
    "mirrors": (dict, False),
    "wheel": (dict, False),
}
_WHEEL_SHAPE = {"env": (dict, False), "generated": (dict, False), "lines": (dict, False)}
_PIN_SHAPE = {
    "version": (str, True),
    "sdist": (str, True),
    "sha256": (str, True),
    "tag": (str, True),
    "commit": (str, False),
    "revision": (int, True),
    "stacks": (list, True),
    "published": (str, False),
}
_TYPE_NAMES = {str: "a string", int: "a whole number", list: "a list", dict: "a table"}


def upstream_names(house: House) -> list[str]:
    return sorted(path.parent.name for path in house.patches.glob("*/upstream.toml"))


def load_upstream(house: House, name: str) -> Upstream:
    """The upstream called `name`. Raises UserError: unknown, or its upstream.toml is malformed."""
    names = upstream_names(house)
    if name not in names:
        raise UserError(f"no upstream {name!r} in patches/; there is: {', '.join(names) or 'none'}")
    folder = house.patches / name
    path = folder / "upstream.toml"
    shown = house.relative(path)
    data = _read(path, shown)
    _raise_first(shape_problems(data, _UPSTREAM_SHAPE, path, shown))
    wheel = data.get("wheel", {})
    _raise_first(shape_problems(wheel, _WHEEL_SHAPE, path, shown))
    return Upstream(
        name=name,
        index_name=data["name"],
        import_name=data["import"],
        repository=data.get("repository", ""),
        newest=data.get("newest", ""),
        mirrors=data.get("mirrors", {}),
        wheel_env=wheel.get("env", {}),
        generated={file: tuple(starts) for file, starts in wheel.get("generated", {}).items()},
        lines=wheel.get("lines", {}),
        folder=folder,
    )


def versions(house: House, upstream: str) -> list[str]:
    """Pinned versions, oldest first."""
    return sorted((path.parent.name for path in (house.patches / upstream).glob("*/pin.toml")), key=_version_key)


def load_pin(house: House, upstream: str, version: str) -> Pin:
    """The pin of `upstream` at `version`.

    Raises UserError, naming what exists, where it is unknown, and for a malformed pin.toml.
    """
    owner = load_upstream(house, upstream)
    known = versions(house, upstream)
    if version not in known:
        raise UserError(f"no pin {upstream} {version!r} in patches/; there is: {', '.join(known) or 'none'}")
    folder = owner.folder / version
    path = folder / "pin.toml"
    shown = house.relative(path)
    data = _read(path, shown)
    _raise_first(pin_problems(data, path, shown))
    return Pin(
        upstream=owner,
        version=data["version"],
        sdist=data["sdist"],
        sha256=data["sha256"],
        tag=data["tag"],
        commit=data.get("commit"),
        revision=data["revision"],
        stacks=tuple(data["stacks"]),
        folder=folder,
        published=data.get("published"),
    )


def all_pins(house: House, upstream: str | None = None, version: str | None = None) -> tuple[Pin, ...]:
    """Every pin, or those of one upstream, or the one asked for. Raises UserError as `load_pin`."""
    if version and not upstream:
        raise UserError(f"VERSION={version} needs UPSTREAM= too; say which upstream's release it is")
    names = [load_upstream(house, upstream).name] if upstream else upstream_names(house)
    return tuple(
        load_pin(house, name, known) for name in names for known in ([version] if version else versions(house, name))
    )


def pin_problems(data: Mapping[str, Any], path: Path, shown: str) -> list[str]:
    """What is wrong with a pin.toml's content, one `path:line: what; do this` each."""
    problems = shape_problems(data, _PIN_SHAPE, path, shown)
    if problems:
        return problems

    def found(key: str, what: str) -> None:
        problems.append(f"{shown}:{_line_of(path, key)}: {what}")

    if data["version"] != path.parent.name:
        found(
            "version",
            f"version {data['version']!r} is not the folder's name {path.parent.name!r}; make them equal",
        )
    for key in ("sha256", "published"):
        if key in data and not re.fullmatch(r"[0-9a-f]{64}", data[key]):
            found(key, f"{key} is not 64 lower-case hex digits; copy it from the package index")
    if not re.fullmatch(r"[^/\\]+\.tar\.(gz|bz2|xz)", data["sdist"]):
        found(
            "sdist",
            "sdist is not a plain file name ending in .tar.gz, .tar.bz2 or .tar.xz; write the sdist's file name",
        )
    if "commit" in data and not re.fullmatch(r"[0-9a-f]{40}", data["commit"]):
        found("commit", "commit is not 40 lower-case hex digits; write it in full, or leave it out")
    if isinstance(data["revision"], bool) or data["revision"] < 1:
        found("revision", "revision is below 1; start at 1 and raise it when the series changes")
    if not data["stacks"] or not all(isinstance(name, str) and name for name in data["stacks"]):
        found("stacks", "stacks is empty or holds something else than names; list files of ci/stacks/")
    return problems


def shape_problems(data: Mapping[str, Any], shape, path: Path, shown: str) -> list[str]:
    problems = []
    for key in data:
        if key not in shape:
            near = difflib.get_close_matches(key, shape, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(shape)}"
            problems.append(f"{shown}:{_line_of(path, key)}: unknown key {key!r}; {hint}")
    for key, (kind, required) in shape.items():
        if key not in data:
            if required:
                problems.append(f"{shown}:1: key {key!r} is missing; add it")
        elif not isinstance(data[key], kind):
            problems.append(f"{shown}:{_line_of(path, key)}: {key} is not {_TYPE_NAMES[kind]}; write one")
    return problems


def _read(path: Path, shown: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{shown}: not valid TOML ({error}); correct it") from None


def _raise_first(problems: list[str]) -> None:
    if problems:
        raise UserError(problems[0])


def _line_of(path: Path, key: str) -> int:
    pattern = re.compile(rf"\s*(\[\s*)?[\"']?{re.escape(key)}[\"']?\s*[=\]]")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if pattern.match(line):
            return number
    return 1


def _version_key(version: str) -> tuple:
    # packaging is slow to import and this orders folder names only.
    return tuple((0, int(part)) if part.isdigit() else (-1, part) for part in re.split(r"[.\-+]", version))
