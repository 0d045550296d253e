"""Sdists: found by name and version, checked by hash, unpacked without trust."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from carry.errors import CouldNotRun, UserError
from carry.paths import House
from carry.pins import Pin
from carry.progress import say


def sdist_path(house: House, pin: Pin) -> Path:
    """Where the pin's sdist lies once fetched; its folder is named by the hash."""
    return house.cache / "sdists" / pin.sha256 / pin.sdist


def fetch(house: House, pin: Pin) -> Path:
    """The pin's sdist in the cache, its sha256 checked now; downloaded where it is not there yet.

    Raises CouldNotRun without a network or where the index lacks the file,
    UserError where its sha256 is not the pin's.
    """
    path = sdist_path(house, pin)
    if path.exists():
        if file_sha256(path) == pin.sha256:
            return path
        path.unlink()  # damaged on this disk; the index has a good one
    path.parent.mkdir(parents=True, exist_ok=True)
    from carry.download import download

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as scratch:
        beside = Path(scratch) / pin.sdist
        say(f"fetching {pin.sdist}")
        origin = download(pin.upstream.index_name, pin.sdist, beside)
        found = file_sha256(beside)
        if found != pin.sha256:
            raise UserError(
                f"{pin.sdist} from {origin} has sha256 {found}, the pin says {pin.sha256}; "
                f"if the release is the one you want, correct {house.relative(pin.folder / 'pin.toml')}"
            )
        os.replace(beside, path)
    return path


def unpack(sdist: Path, folder: Path) -> None:
    """Unpack `sdist` so that its one top folder becomes `folder`, which must not exist.

    Refuses, with UserError, a member outside the top folder, a link that leaves
    it, and a device node. Nothing is left behind on failure.
    """
    if not hasattr(tarfile, "data_filter"):
        raise CouldNotRun("this Python's tarfile has no data filter; use 3.10.12, 3.11.4, 3.12 or newer")
    folder.mkdir(parents=True)
    try:
        with tarfile.open(sdist) as archive:
            top = ""
            for member in archive:
                first, _, rest = member.name.partition("/")
                top = top or first
                if first != top or first in ("", ".", ".."):
                    raise UserError(
                        f"{sdist.name}: member {member.name!r} lies outside the sdist's folder "
                        f"{top!r}; do not use this sdist"
                    )
                if not rest:
                    continue
                inner = member.replace(name=rest, deep=False)
                if member.islnk():
                    inner = inner.replace(linkname=member.linkname.removeprefix(top + "/"), deep=False)
                archive.extract(inner, folder, filter="data")
    except tarfile.FilterError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"{sdist.name}: {_why(error)}; do not use this sdist") from None
    except (tarfile.TarError, EOFError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"{sdist.name}: not a readable sdist ({error}); do not use it") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def release_time(folder: Path) -> int:
    """Seconds since 1970 of an unpacked sdist's PKG-INFO: the release's own date, the same everywhere."""
    try:
        return int((folder / "PKG-INFO").stat().st_mtime)
    except FileNotFoundError:
        raise UserError(f"{folder.name} holds no PKG-INFO, so it is no sdist; pin another file") from None


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _why(error: tarfile.FilterError) -> str:
    name = error.tarinfo.name
    if isinstance(error, tarfile.SpecialFileError):
        return f"member {name!r} is a device node or another special file"
    if isinstance(error, tarfile.AbsoluteLinkError | tarfile.LinkOutsideDestinationError):
        return f"member {name!r} links to {error.tarinfo.linkname!r}, outside the sdist's folder"
    return f"member {name!r} lies outside the sdist's folder"
