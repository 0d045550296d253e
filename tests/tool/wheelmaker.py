"""Small real wheels, in parts that a test can spoil one at a time."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

Files = dict[str, bytes]


def make_wheel(
    folder: Path,
    name: str = "demo",
    version: str = "1.0+resume.1",
    *,
    requires_python: str | None = ">=3.8",
    requires: tuple[str, ...] = (),
    carry: dict | None = None,
    body: str = "",
    spoil: Callable[[Files], object] = lambda files: None,
    file: str | None = None,
) -> Path:
    """A pure wheel in `folder`; `spoil` may change its files, RECORD included, before they are zipped."""
    info = f"{name}-{version}.dist-info"
    headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    headers += [f"Requires-Python: {requires_python}"] if requires_python else []
    headers += [f"Requires-Dist: {requirement}" for requirement in requires]
    files: Files = {
        f"{name}/__init__.py": f"version = {version!r}\n{body}".encode(),
        f"{info}/METADATA": ("\n".join(headers) + "\n").encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: made\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if carry is not None:
        files[f"{info}/carry.json"] = json.dumps(carry).encode()
    rows = [f"{path},sha256={_digest(content)},{len(content)}" for path, content in files.items()]
    files[f"{info}/RECORD"] = ("\n".join([*rows, f"{info}/RECORD,,"]) + "\n").encode()
    spoil(files)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (file or f"{name}-{version}-py3-none-any.whl")
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in files.items():
            archive.writestr(zipfile.ZipInfo(inside), content)
    return path


def provenance(version: str = "1.0", revision: int = 1, flavour: str = "patched", **other: object) -> dict:
    """A carry.json; `other` replaces its fields."""
    return {
        "schema": 1,
        "upstream": "demo",
        "version": version,
        "flavour": flavour,
        "revision": revision,
        "variant": "pure",
        "series_sha256": "0" * 64,
        "faults": ["stale-masters"] if flavour == "patched" else [],
        "patches": [],
        **other,
    }


def tree(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of every file below `folder`."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
