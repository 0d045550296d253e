from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from carry.buildenv import build_python
from carry.lock import locked
from carry.paths import House
from toyhouse import ToyHouse, make_toy

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def build_env() -> Path:
    """The folder of the repository's own build environments, with the current one ready."""
    house = House(ROOT)
    with locked(house.build, "the tool's tests", lambda line: None):
        build_python(house)
    return house.cache / "build-env"


@pytest.fixture
def toy(tmp_path: Path) -> ToyHouse:
    """A toy house that builds no wheel."""
    return make_toy(tmp_path)


@pytest.fixture
def builder(tmp_path: Path, build_env: Path) -> ToyHouse:
    """A toy house that can build wheels offline."""
    return make_toy(tmp_path, build_env)


@pytest.fixture(scope="session")
def _series(tmp_path_factory: pytest.TempPathFactory) -> ToyHouse:
    return make_toy(tmp_path_factory.mktemp("series")).with_series()


@pytest.fixture
def series(tmp_path: Path, _series: ToyHouse) -> ToyHouse:
    """A toy house with a series of two patches, and a work tree with their commits."""
    shutil.copytree(_series.root.parent, tmp_path, dirs_exist_ok=True, symlinks=True)
    return ToyHouse(tmp_path / "house", tmp_path / "links")
