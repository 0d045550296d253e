"""The page that an index shows to people: what each wheel fixes and the lines that install it."""

from __future__ import annotations

import json
import zipfile
from html import escape
from pathlib import Path
from typing import NamedTuple

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from carry.errors import UserError
from carry.wheelcheck import provenance_of


class _Entry(NamedTuple):
    project: str
    version: Version
    file: str
    sha256: str
    faults: tuple[str, ...]


def install_lines(index_url: str, requirement: str) -> dict[str, str]:
    """Tool -> the command that installs `requirement`, an exact local version, and cannot take another."""
    return {
        "pip": f"pip install --extra-index-url {index_url} '{requirement}'",
        "uv": f"uv pip install --index {index_url} '{requirement}'",
    }


def welcome(root: Path, url: str) -> bytes:
    """The page for the index in `root`, served at `url` (with its slash) plus `simple/`."""
    sections = "".join(_section(entry, f"{url}simple/") for entry in _newest_first(_entries(root)))
    nothing = "<p>Nothing is published yet: run <code>make index</code>.</p>\n"
    return _PAGE.format(sections=sections or nothing).encode()


def _entries(root: Path) -> list[_Entry]:
    entries = []
    for page in root.glob("*/index.json"):
        for file in json.loads(page.read_bytes())["files"]:
            name, version, _, _ = parse_wheel_filename(file["filename"])
            try:
                faults = provenance_of(page.parent / file["filename"]).get("faults", ())
            except (OSError, zipfile.BadZipFile, UserError):
                continue  # it is being replaced, or its own page will say
            entries.append(_Entry(name, version, file["filename"], file["hashes"]["sha256"], tuple(faults)))
    return entries


def _newest_first(entries: list[_Entry]) -> list[_Entry]:
    by_version = sorted(entries, key=lambda entry: entry.version, reverse=True)
    return sorted(by_version, key=lambda entry: entry.project)


def _section(entry: _Entry, index_url: str) -> str:
    requirement = f"{entry.project}=={entry.version}"
    lines = "\n".join(install_lines(index_url, requirement).values())
    faults = "".join(f"<li><code>{escape(fault)}</code></li>" for fault in entry.faults)
    return (
        f"<section>\n<h2>{escape(entry.project)} {escape(str(entry.version))}</h2>\n"
        + (f"<p>Fixes</p>\n<ul>{faults}</ul>\n" if faults else "<p>Fixes nothing that is known here.</p>\n")
        + f"<pre>{escape(lines)}</pre>\n"
        f'<p class="small"><a href="simple/{escape(entry.project)}/">{escape(entry.file)}</a><br>'
        f"sha256 {entry.sha256}</p>\n</section>\n"
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>carry: patched releases</title>
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 54rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
h1, h2 {{ font-weight: 600; margin-bottom: 0.3rem; }}
section {{ border-top: 1px solid #ccc; margin-top: 1.5rem; }}
pre {{ background: #f4f4f4; padding: 0.7rem; overflow-x: auto; }}
ul {{ margin: 0; columns: 18rem; }} p {{ margin: 0.5rem 0; }}
.small {{ font-size: 0.8rem; color: #555; overflow-wrap: anywhere; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #181818; color: #ddd; }} pre {{ background: #262626; }}
  a {{ color: #8bf; }} .small {{ color: #aaa; }}
}}
</style>
</head>
<body>
<h1>Patched releases</h1>
<p>Upstream releases with the faults below fixed, each proven on the pristine and on the patched build.
Keep the full version, with what follows the <code>+</code>: only this index has it, so an installer that
cannot find the patched wheel fails and never takes the unpatched release.
Machines read <a href="simple/">simple/</a>.</p>
{sections}</body>
</html>
"""
