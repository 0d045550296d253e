"""The pages of a static package index, as bytes: HTML (PEP 503) and JSON (PEP 691).

The same wheels always give the same bytes. That is why no file has an `upload-time` (optional in PEP 700):
the only honest value is the moment of publishing, and it would change with every run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from html import escape
from urllib.parse import quote

from packaging.utils import parse_wheel_filename

from carry.wheelcheck import Wheel

API_VERSION = "1.1"


def render(wheels: Iterable[Wheel]) -> dict[str, bytes]:
    """Every page of an index of `wheels`: relative path -> content, wheels themselves left out."""
    projects: dict[str, list[Wheel]] = {}
    for wheel in sorted(wheels, key=_order):
        projects.setdefault(wheel.project, []).append(wheel)
    names = sorted(projects)
    pages = {
        "index.html": _html("Simple index", [f'<a href="{name}/">{name}</a>' for name in names]),
        "index.json": _json({"projects": [{"name": name} for name in names]}),
    }
    for name in names:
        files = projects[name]
        pages[f"{name}/index.html"] = _html(f"Links for {name}", map(_anchor, files))
        pages[f"{name}/index.json"] = _json(
            {
                "name": name,
                "versions": list(dict.fromkeys(str(wheel.version) for wheel in files)),
                "files": list(map(_file, files)),
            }
        )
        pages.update({f"{name}/{wheel.file}.metadata": wheel.metadata for wheel in files})
    return pages


def _order(wheel: Wheel) -> tuple:
    return wheel.project, wheel.version, parse_wheel_filename(wheel.file)[2], wheel.file


def _href(wheel: Wheel) -> str:
    # quote() escapes `+`: some servers and proxies read a bare one in a path as a space.
    return quote(wheel.file)


def _anchor(wheel: Wheel) -> str:
    metadata = f"sha256={_sha256(wheel.metadata)}"
    # PEP 714 renamed the attribute; pip < 23.2 knows only the old name.
    attributes = {"data-core-metadata": metadata, "data-dist-info-metadata": metadata}
    if wheel.requires_python is not None:
        attributes["data-requires-python"] = wheel.requires_python
    extra = "".join(f' {key}="{escape(value)}"' for key, value in attributes.items())
    return f'<a href="{_href(wheel)}#sha256={wheel.sha256}"{extra}>{escape(wheel.file)}</a>'


def _file(wheel: Wheel) -> dict:
    entry = {
        "filename": wheel.file,
        "url": _href(wheel),
        "hashes": {"sha256": wheel.sha256},
        "size": wheel.size,
        # JSON has the new name only: the old one makes pip 22.3 to 23.1 fail (PEP 714).
        "core-metadata": {"sha256": _sha256(wheel.metadata)},
        "yanked": False,
    }
    if wheel.requires_python is not None:
        entry["requires-python"] = wheel.requires_python
    return entry


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _html(title: str, anchors: Iterable[str]) -> bytes:
    body = "".join(f"{anchor}<br>\n" for anchor in anchors)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="pypi:repository-version" content="{API_VERSION}">\n'
        f"<title>{title}</title>\n</head>\n<body>\n<h1>{title}</h1>\n{body}</body>\n</html>\n"
    ).encode()


def _json(body: dict) -> bytes:
    page = {"meta": {"api-version": API_VERSION}, **body}
    return (json.dumps(page, indent=1, sort_keys=True) + "\n").encode()
