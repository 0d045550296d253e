"""What a stack holds besides its lock: Python sources out of archives that cannot be installed as they are."""

from __future__ import annotations

import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from carry.download import download
from carry.errors import UserError
from carry.paths import House
from carry.pins import shape_problems, tomllib
from carry.sources import file_sha256


@dataclass(frozen=True)
class Sources:
    """The .py files of `package` (a folder or a module) below `inside` of the archive `file`; nothing compiled."""

    project: str
    file: str
    sha256: str
    package: str
    inside: str = ""


_SHAPE = dict.fromkeys(("project", "file", "sha256", "package"), (str, True)) | {"inside": (str, False)}


def load_extras(house: House, path: Path) -> tuple[Sources, ...]:
    """What ci/stacks/<name>.extra.toml lists. Raises UserError where it is malformed."""
    shown = house.relative(path)
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("sources", [])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{shown}: not valid TOML ({error}); correct it") from None
    for row in rows:
        if problems := shape_problems(row, _SHAPE, path, shown):
            raise UserError(problems[0])
    return tuple(Sources(**row) for row in rows)


def unpack_extras(house: House, extras: Iterable[Sources], dest: Path) -> None:
    """Put each one's sources into `dest`, the site-packages of an environment.

    Raises UserError where an archive is not the one listed, CouldNotRun where it cannot be fetched.
    """
    for extra in extras:
        with tempfile.TemporaryDirectory(prefix="carry-extra-") as scratch:
            path = Path(scratch) / extra.file
            origin = download(extra.project, extra.file, path)
            found = file_sha256(path)
            if found != extra.sha256:
                raise UserError(f"{extra.file} from {origin} has sha256 {found}, not {extra.sha256} as ci/stacks says")
            sources = list(_sources(path, extra))
            if not sources:
                raise UserError(f"{extra.file} holds no .py file of {extra.package}; correct ci/stacks")
            for name, content in sources:
                (dest / name).parent.mkdir(parents=True, exist_ok=True)
                (dest / name).write_bytes(content)


def _sources(path: Path, extra: Sources) -> Iterator[tuple[PurePosixPath, bytes]]:
    if path.name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(path) as archive:
            yield from _chosen(archive.namelist(), extra, archive.read)
    else:
        with tarfile.open(path) as archive:
            files = [member.name for member in archive if member.isfile()]
            yield from _chosen(files, extra, lambda name: archive.extractfile(name).read())


def _chosen(names: Iterable[str], extra: Sources, read: Callable[[str], bytes]):
    inside = PurePosixPath(extra.inside)
    for name in names:
        path = PurePosixPath(name)
        if name.endswith(".py") and ".." not in path.parts and path.is_relative_to(inside):
            inner = path.relative_to(inside)
            if inner.parts[0] == extra.package:
                yield inner, read(name)
