"""The pipelines call make targets, and carry where its exit code matters, and nothing else."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from carry.cli import COMMANDS, parser
from carry.plan import cells, github, gitlab, upstreams
from toyhouse import ToyHouse

ROOT = Path(__file__).resolve().parents[2]
TARGETS = re.findall(r"^([a-z-]+): ready ##", (ROOT / "Makefile").read_text(), re.MULTILINE)


def commands(path: Path) -> list[str]:
    """Every shell line of a pipeline: `run:` of GitHub, the items of `script:` of GitLab; folded ones joined."""
    text = re.sub(r">-\n((?: {6,}(?!- )\S.*\n)+)", lambda m: " ".join(m[1].split()) + "\n", path.read_text())
    found = re.findall(r"^\s*(?:- )?run: (.*)$", text, re.MULTILINE)
    for block in re.findall(r"^  script:\n((?:    - .*\n)+)", text, re.MULTILINE):
        found += [line.strip().removeprefix("- ") for line in block.splitlines()]
    return found


@pytest.mark.parametrize("name", ["github", "gitlab"])
def test_pipelines_call_nothing_else(name):
    found = [line for path in sorted((ROOT / "ci" / name).rglob("*.yml")) for line in commands(path)]
    assert len(found) >= 8
    for line in found:
        program, first, *rest = shlex.split(line.partition(" > ")[0])
        if program == "make":
            assert first in TARGETS, line
        else:
            assert program == ".venv/bin/carry" and first in COMMANDS, line
            parser().parse_args([first, *rest])
    assert any("carry bump" in line for line in found) and any("make prove" in line for line in found)


def test_no_pipeline_names_a_pin():
    pinned = [path.parent.name for path in (ROOT / "patches").glob("*/*/pin.toml")]
    for path in [*(ROOT / "ci" / "github").iterdir(), *(ROOT / "ci" / "gitlab").iterdir()]:
        lines = [line for line in path.read_text().splitlines() if "replay" not in line and "--behaviour" not in line]
        assert not [version for version in pinned if version in "\n".join(lines)], path


def test_renovate_finds_the_newest_release_of_every_upstream():
    (manager,) = json.loads((ROOT / "ci" / "renovate.json").read_text())["customManagers"]
    (pattern,), (files,) = manager["matchStrings"], manager["managerFilePatterns"]
    for path in (ROOT / "patches").glob("*/upstream.toml"):
        assert re.search(files.strip("/"), str(path.relative_to(ROOT)))
        found = re.search(pattern.replace("(?<", "(?P<"), path.read_text())
        assert found["depName"] and f'newest = "{found["currentValue"]}"' in path.read_text()


def test_plan(toy: ToyHouse, tmp_path: Path):
    cell = {"upstream": "toy", "version": "1.0", "stack": "toy-stack"}
    assert cells([toy.pin]) == [cell]
    assert json.loads(toy.run("plan", "--json").stdout) == github([toy.pin]) == {"include": [cell]}
    assert toy.run("plan").stdout == "toy  1.0  toy-stack\n"
    assert json.loads(toy.run("plan", "--gitlab").stdout) == gitlab([toy.pin])
    assert gitlab([toy.pin])["prove"]["parallel"] == {"matrix": [{"UPSTREAM": "toy", "VERSION": "1.0"}]}
    out = tmp_path / "output"
    toy.run("plan", GITHUB_ACTIONS="true", GITHUB_OUTPUT=str(out))
    lines = dict(line.split("=", 1) for line in out.read_text().splitlines())
    assert {name: json.loads(value) for name, value in lines.items()} == {
        "cells": github([toy.pin]), "upstreams": upstreams([toy.pin])}  # fmt: skip
