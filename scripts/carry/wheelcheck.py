"""One wheel file, read and believed only after its bytes have been checked."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import zipfile
import zlib
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import NamedTuple

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from carry.errors import UserError

_CHUNK = 1 << 20
_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
# The wheel format leaves these out of RECORD's hashes.
_UNHASHED = ("RECORD", "RECORD.jws", "RECORD.p7s")


class Wheel(NamedTuple):
    """A checked wheel; `sha256` and `size` (bytes) are the file's, `metadata` is its METADATA verbatim."""

    path: Path
    project: str
    version: Version
    sha256: str
    size: int
    requires_python: str | None
    metadata: bytes
    carry: dict | None

    @property
    def file(self) -> str:
        return self.path.name

    @property
    def provenance(self) -> dict:
        """What carry.json says, or nothing for a wheel that carry did not build."""
        return self.carry or {}


def sha256_of(path: Path) -> str:
    """The file's sha256 in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def read_wheel(path: Path) -> Wheel:
    """Check the wheel's name, zip, RECORD and METADATA, and return what an index needs of it.

    Raises UserError, one line, for a file that is missing, truncated, corrupt or misnamed.
    """
    path = Path(path)
    try:
        project, version, _, _ = parse_wheel_filename(path.name)
    except (InvalidWheelFilename, InvalidVersion):
        raise UserError(f"{path}: not the name of a wheel") from None
    try:
        sha256, size = sha256_of(path), path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            info = _dist_info(path, archive)
            _check_record(path, archive, info)
            metadata = archive.read(f"{info}/METADATA")
            carry = _carry(path, archive, info)
    except FileNotFoundError:
        raise UserError(f"{path}: no such wheel") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{path}: truncated or corrupt wheel ({error}); build it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    requires_python = _check_metadata(path, metadata, project, version)
    return Wheel(path, project, version, sha256, size, requires_python, metadata, carry)


def provenance_of(path: Path) -> dict:
    """What carry.json in the wheel says, nothing else checked; empty for a wheel that carry did not build."""
    with zipfile.ZipFile(path) as archive:
        return _carry(path, archive, _dist_info(path, archive)) or {}


def _dist_info(path: Path, archive: zipfile.ZipFile) -> str:
    found = [name for name in archive.namelist() if _METADATA.fullmatch(name)]
    if len(found) != 1:
        raise UserError(f"{path}: {len(found)} dist-info/METADATA files, not one; build it again")
    return found[0].rpartition("/")[0]


def _check_record(path: Path, archive: zipfile.ZipFile, info: str) -> None:
    names = [name for name in archive.namelist() if not name.endswith("/")]
    if len(names) != len(set(names)):
        raise UserError(f"{path}: holds a file twice; build it again")
    record = f"{info}/RECORD"
    if record not in names:
        raise UserError(f"{path}: has no RECORD; build it again")
    try:
        rows = list(csv.reader(io.StringIO(archive.read(record).decode(), newline="")))
        listed = {name: (digest, size) for name, digest, size in rows}
    except ValueError:
        raise UserError(f"{path}: RECORD is malformed; build it again") from None
    unhashed = {f"{info}/{name}" for name in _UNHASHED}
    for name in sorted({*names, *listed} - unhashed):
        if name not in listed:
            raise UserError(f"{path}: {name} is not in RECORD; build it again")
        if name not in names:
            raise UserError(f"{path}: RECORD lists {name}, which the wheel lacks; build it again")
        _check_row(path, archive, name, *listed[name])


def _check_row(path: Path, archive: zipfile.ZipFile, name: str, digest: str, size: str) -> None:
    algorithm, _, expected = digest.partition("=")
    if algorithm not in ("sha256", "sha384", "sha512"):
        raise UserError(f"{path}: RECORD gives no usable hash for {name}; build it again")
    data = archive.read(name)
    actual = base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).rstrip(b"=").decode()
    if actual != expected or size not in ("", str(len(data))):
        raise UserError(f"{path}: {name} is not what RECORD says; build it again")


def _check_metadata(path: Path, metadata: bytes, project: str, version: Version) -> str | None:
    headers = BytesHeaderParser().parsebytes(metadata)
    name, said = headers["Name"] or "", headers["Version"] or ""
    try:
        agrees = canonicalize_name(name) == project and Version(said) == version
    except InvalidVersion:
        agrees = False
    if not agrees:
        raise UserError(f"{path}: its METADATA is of {name or '?'} {said or '?'}; build it again")
    requires_python = headers["Requires-Python"]
    if requires_python is None:
        return None
    try:
        SpecifierSet(requires_python)
    except InvalidSpecifier:
        raise UserError(f"{path}: METADATA has a bad Requires-Python ({requires_python!r})") from None
    return str(requires_python)


def _carry(path: Path, archive: zipfile.ZipFile, info: str) -> dict | None:
    try:
        carry = json.loads(archive.read(f"{info}/carry.json"))
    except KeyError:
        return None
    except ValueError:
        raise UserError(f"{path}: carry.json is not JSON; build it again") from None
    if not isinstance(carry, dict):
        raise UserError(f"{path}: carry.json is not a JSON object; build it again")
    return carry
