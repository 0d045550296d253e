"""What a stack holds besides its lock: Python sources out of wheels that cannot be installed whole."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from carry.download import download
from carry.errors import UserError
from carry.paths import House
from carry.pins import shape_problems, tomllib
from carry.sources import file_sha256


@dataclass(frozen=True)
class Sources:
    """The .py files of `package` in the wheel `file` of `project`, and nothing compiled."""

    project: str
    file: str
    sha256: str
    package: str


_SHAPE = {key: (str, True) for key in ("project", "file", "sha256", "package")}


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

    Raises UserError where a wheel is not the one listed, CouldNotRun where it cannot be fetched.
    """
    for extra in extras:
        with tempfile.TemporaryDirectory(prefix="carry-extra-") as scratch:
            wheel = Path(scratch) / extra.file
            origin = download(extra.project, extra.file, wheel)
            found = file_sha256(wheel)
            if found != extra.sha256:
                raise UserError(f"{extra.file} from {origin} has sha256 {found}, not {extra.sha256} as ci/stacks says")
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if _is_source(name, extra.package)]
                if not names:
                    raise UserError(f"{extra.file} holds no .py file of {extra.package}; correct ci/stacks")
                archive.extractall(dest, names)


def _is_source(name: str, package: str) -> bool:
    parts = PurePosixPath(name).parts
    return name.endswith(".py") and parts[0] == package and ".." not in parts
