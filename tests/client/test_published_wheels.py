"""The pristine wheel of a pin holds the very files of the wheel that upstream published, by sha256.

For the upstreams that publish one: their pins name its hash in pin.toml.  What may differ are the file with the
version, and what the build itself writes below dist-info.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from carry.download import download
from carry.paths import find_house
from carry.pins import Pin, all_pins
from carry.sources import file_sha256
from carry.wheels import wheel_name

HOUSE = find_house()
PINS = [pin for pin in all_pins(HOUSE) if pin.published]


def files(wheel: Path) -> dict[str, bytes]:
    """Every file but those of dist-info, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_every_nemo_pin_is_audited():
    assert [str(pin) for pin in PINS] == [str(pin) for pin in all_pins(HOUSE, "nemo")]


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_pristine_wheel_is_upstreams(pin: Pin, tmp_path: Path):
    theirs = tmp_path / f"{pin.upstream.file_name}-{pin.version}-py3-none-any.whl"
    download(pin.upstream.index_name, theirs.name, theirs)
    assert file_sha256(theirs) == pin.published
    ours, published = files(HOUSE.candidate / pin.upstream.index_name / wheel_name(pin, "pristine")), files(theirs)
    assert len(published) > 500
    assert {name for name in ours.keys() | published.keys() if ours.get(name) != published.get(name)} == set(
        pin.upstream.generated
    )
    for name, starts in pin.upstream.generated.items():
        rest = [
            [line for line in text[name].splitlines() if not line.startswith(tuple(map(str.encode, starts)))]
            for text in (ours, published)
        ]
        assert rest[0] == rest[1], name
