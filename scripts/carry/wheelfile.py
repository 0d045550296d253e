"""A wheel's zip, written again so that equal content gives equal bytes."""

from __future__ import annotations

import base64
import hashlib
import time
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from carry.errors import CarryError


def rewrite(
    source: Path,
    dest: Path,
    epoch: int,
    extra: Mapping[str, bytes],
    generated: Mapping[str, tuple[bytes, tuple[str, ...]]],
) -> None:
    """Copy the wheel `source` to `dest` with fixed order, times and permissions, and RECORD made anew.

    `extra` files go into its dist-info. For each file of `generated`, lines that begin with one of the
    given strings are the built wheel's and all others those of the given bytes. METADATA's Requires-Dist
    lines are sorted, because some setup.py build them from a set. Entries are stored, not compressed:
    zlib's output differs between its implementations, and the same inputs must give the same bytes.
    """
    with zipfile.ZipFile(source) as archive:
        modes, files = {}, {}
        for info in archive.infolist():
            if not info.is_dir():
                files[info.filename] = archive.read(info)
                modes[info.filename] = 0o755 if (info.external_attr >> 16) & 0o100 else 0o644
    info_folder = dist_info(files)
    record = f"{info_folder}/RECORD"
    for file, (published, starts) in generated.items():
        if file in files:
            files[file] = merge_lines(file, published, files[file], starts)
    files[f"{info_folder}/METADATA"] = sort_requirements(files[f"{info_folder}/METADATA"])
    for name, content in extra.items():
        files[f"{info_folder}/{name}"] = content
    files.pop(record, None)
    rows = [_record_row(name, files[name]) for name in sorted(files)]
    files[record] = ("\n".join([*rows, f"{record},,"]) + "\n").encode()
    stamp = time.gmtime(max(epoch, 315532800))[:6]  # zip knows no time before 1980
    # dist-info last, as the wheel specification recommends.
    order = sorted(files, key=lambda name: (name.startswith(info_folder + "/"), name == record, name))
    with zipfile.ZipFile(dest, "w", zipfile.ZIP_STORED) as archive:
        for name in order:
            entry = zipfile.ZipInfo(name, stamp)
            entry.create_system = 3
            entry.external_attr = (0o100000 | modes.get(name, 0o644)) << 16
            archive.writestr(entry, files[name])


def dist_info(names: Iterable[str]) -> str:
    """The one .dist-info folder among a wheel's file names. Raises CarryError where it is not one."""
    folders = {name.partition("/")[0] for name in names if name.partition("/")[0].endswith(".dist-info")}
    if len(folders) != 1:
        raise CarryError(f"a wheel has one .dist-info folder, this one has {len(folders)}")
    return folders.pop()


def merge_lines(file: str, published: bytes, built: bytes, starts: tuple[str, ...]) -> bytes:
    """`published` with its lines that begin with one of `starts` replaced by those of `built`."""
    lines = published.decode().splitlines()
    fresh = built.decode().splitlines()
    for start in starts:
        places = [number for number, line in enumerate(lines) if line.startswith(start)]
        values = [line for line in fresh if line.startswith(start)]
        if len(places) != len(values) or not places:
            raise CarryError(f"{file}: {len(places)} published and {len(values)} built lines begin with {start!r}")
        for place, value in zip(places, values, strict=True):
            lines[place] = value
    return ("\n".join(lines) + "\n").encode()


def sort_requirements(metadata: bytes) -> bytes:
    """METADATA with each run of Requires-Dist lines in order; nothing else changes."""
    head, blank, body = metadata.partition(b"\n\n")
    lines = head.split(b"\n")
    places = [number for number, line in enumerate(lines) if line.startswith(b"Requires-Dist:")]
    for place, line in zip(places, sorted(lines[place] for place in places), strict=True):
        lines[place] = line
    return b"\n".join(lines) + blank + body


def _record_row(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    quoted = '"' + name.replace('"', '""') + '"' if any(sign in name for sign in ',"') else name
    return f"{quoted},sha256={digest},{len(content)}"
