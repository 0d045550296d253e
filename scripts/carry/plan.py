"""The cells that CI fans out over, so that adding a pin edits no pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from carry.pins import Pin


def cells(pins: Sequence[Pin]) -> list[dict[str, str]]:
    """One cell for each pin and stack."""
    return [
        {"upstream": pin.upstream.name, "version": pin.version, "stack": stack} for pin in pins for stack in pin.stacks
    ]


def github(pins: Sequence[Pin]) -> dict:
    """What `strategy: matrix:` takes: every cell."""
    return {"include": cells(pins)}


def upstreams(pins: Sequence[Pin]) -> dict:
    """As `github`, one cell for each upstream: what the gate fans out over."""
    return {"include": [{"upstream": name} for name in dict.fromkeys(pin.upstream.name for pin in pins)]}


def gitlab(pins: Sequence[Pin]) -> dict:
    """A child pipeline, JSON being YAML: `.prove` of ci/gitlab/jobs.yml for each pin, `.gate` for each upstream."""
    rows = [{"UPSTREAM": pin.upstream.name, "VERSION": pin.version} for pin in pins]
    gates = [{"UPSTREAM": cell["upstream"]} for cell in upstreams(pins)["include"]]
    return {
        "include": [{"local": "ci/gitlab/jobs.yml"}],
        "prove": {"extends": ".prove", "parallel": {"matrix": rows}},
        "gate": {"extends": ".gate", "parallel": {"matrix": gates}},
    }
