"""`carry clean`: all that can be made again goes, and nothing else."""

import time

from carry.lock import locked
from toyhouse import ToyHouse


def test_everything_goes(toy: ToyHouse, tmp_path):
    toy.run("apply", "toy", "1.0")
    (toy.house.wheels).mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (toy.house.dist / "link").symlink_to(tmp_path / "mine")
    assert toy.run("clean").stdout == ""
    assert not (toy.root / "build").exists() and not (toy.root / "dist").exists()
    assert (tmp_path / "mine" / "file").exists()
    assert toy.run("clean").stdout == ""


def test_the_published_index_stays_and_is_named(toy: ToyHouse):
    (toy.house.simple / "toy").mkdir(parents=True)
    toy.house.wheels.mkdir()
    said = toy.run("clean").stdout
    assert said == "kept  dist/simple/, the published index; remove it by hand where nobody installs from it any more\n"
    assert [path.name for path in toy.house.dist.iterdir()] == ["simple"]
    assert (toy.house.simple / "toy").is_dir() and not toy.house.build.exists()


def test_it_waits_for_a_run_that_tests(toy: ToyHouse):
    with locked(toy.house.build / "sites", "carry prove", lambda line: None):
        (toy.house.build / "sites" / "a").touch()
        cleaning = toy.start("clean")
        assert cleaning.stderr is not None
        assert "build/sites is in use by carry prove" in cleaning.stderr.readline()
        time.sleep(0.2)
        assert cleaning.poll() is None and (toy.house.build / "sites" / "a").exists()
    assert cleaning.communicate(timeout=60) == ("", "")
    assert cleaning.returncode == 0 and not toy.house.build.exists()


def test_a_folder_that_is_a_link_is_emptied(toy: ToyHouse, tmp_path):
    (tmp_path / "big").mkdir()
    toy.house.build.symlink_to(tmp_path / "big")
    toy.run("apply", "toy", "1.0")
    toy.run("clean")
    assert list((tmp_path / "big").iterdir()) == [] and toy.house.build.is_symlink()
