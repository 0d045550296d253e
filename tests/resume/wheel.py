"""Which wheel is under test: read from the metadata of the installed one, without importing it."""

from __future__ import annotations

import importlib.metadata
import json
import os
from dataclasses import dataclass

# upstream -> its name on the package index, where that is another
DISTRIBUTION = {"nemo": "nemo-toolkit"}


@dataclass(frozen=True)
class Wheel:
    """``version``: the upstream release. ``flavour``: pristine or patched. ``faults``: the ids it fixes."""

    upstream: str
    version: str
    flavour: str
    faults: frozenset[str]


def installed(upstream: str) -> Wheel:
    """The installed wheel of ``upstream``; raises LookupError when it was not built by carry.

    ``CARRY_WHEEL_JSON`` names a carry.json to read instead, for trying a test on a source tree.
    """
    override = os.environ.get("CARRY_WHEEL_JSON")
    if override:
        with open(override) as file:
            text = file.read()
    else:
        text = importlib.metadata.distribution(DISTRIBUTION.get(upstream, upstream)).read_text("carry.json")
    if text is None:
        raise LookupError(f"the installed {upstream} has no carry.json: install a wheel from carry's index")
    data = json.loads(text)
    return Wheel(data["upstream"], data["version"], data["flavour"], frozenset(data["faults"]))
