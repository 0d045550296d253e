import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from carry.errors import UserError
from carry.sources import fetch, release_time, sdist_path, unpack
from toyhouse import ToyHouse, make_sdist, write_pin


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Callable[[tarfile.TarFile], object]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 4 if kind == tarfile.REGTYPE else 0
    return lambda archive: archive.addfile(info, io.BytesIO(b"evil"[: info.size]))


def test_an_sdist_unpacks_to_its_folder(tmp_path: Path):
    sdist = tmp_path / "toy-1.0.tar.gz"
    make_sdist(sdist, extra=member("toy-1.0/link", tarfile.SYMTYPE, "toy/core.py"))
    unpack(sdist, tmp_path / "out")
    assert (tmp_path / "out" / "toy" / "core.py").read_text().startswith("line_1 = 1\n")
    assert (tmp_path / "out" / "link").resolve() == tmp_path / "out" / "toy" / "core.py"
    assert (tmp_path / "out" / "bin" / "toy").stat().st_mode & 0o777 == 0o755
    assert release_time(tmp_path / "out") == 1_600_000_000


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        (member("toy-1.0/../evil"), "member '../evil' lies outside the sdist's folder"),
        (member("evil"), "member 'evil' lies outside the sdist's folder 'toy-1.0'"),
        (member("/etc/evil"), "member '/etc/evil' lies outside the sdist's folder 'toy-1.0'"),
        (member("../evil"), "member '../evil' lies outside the sdist's folder 'toy-1.0'"),
        (member("toy-1.0/tty", tarfile.CHRTYPE), "member 'tty' is a device node or another special file"),
        (member("toy-1.0/pipe", tarfile.FIFOTYPE), "member 'pipe' is a device node or another special file"),
        (
            member("toy-1.0/l", tarfile.SYMTYPE, "../x"),
            "member 'l' links to '../x', outside the sdist's folder",
        ),
        (
            member("toy-1.0/l", tarfile.SYMTYPE, "/etc"),
            "member 'l' links to '/etc', outside the sdist's folder",
        ),
        (
            member("toy-1.0/l", tarfile.LNKTYPE, "../x"),
            "member 'l' links to '../x', outside the sdist's folder",
        ),
    ],
)
def test_a_member_that_reaches_outside_is_refused_and_nothing_is_left(tmp_path: Path, extra, what: str):
    sdist = tmp_path / "in" / "toy-1.0.tar.gz"
    make_sdist(sdist, extra=extra)
    with pytest.raises(UserError) as caught:
        unpack(sdist, tmp_path / "out")
    assert str(caught.value) == f"toy-1.0.tar.gz: {what}; do not use this sdist"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_file_that_is_no_archive(tmp_path: Path):
    (tmp_path / "toy-1.0.tar.gz").write_bytes(b"<html>not found</html>")
    with pytest.raises(UserError, match="not a readable sdist"):
        unpack(tmp_path / "toy-1.0.tar.gz", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [("build-wheels",), ("apply", "toy", "1.0"), ("lint",)])
def test_a_bad_sdist_stops_every_command_with_one_line(toy: ToyHouse, command):
    sha256 = make_sdist(toy.links / "toy-1.0.tar.gz", extra=member("toy-1.0/tty", tarfile.BLKTYPE))
    write_pin(toy.pin_file, sha256)
    done = toy.run(*command, check=1)
    assert "device node" in done.stdout + done.stderr
    assert not (toy.root / "dist").exists()
    assert not list((toy.root / "build" / "cache").glob(".unpack-*"))


def test_a_wrong_sha256_is_told_before_the_sdist_is_used(toy: ToyHouse):
    write_pin(toy.pin_file, "0" * 64)
    done = toy.run("build-wheels", check=1)
    said = done.stderr.splitlines()[-1]
    assert "has sha256" in said and f"the pin says {'0' * 64}" in said and "patches/toy/1.0/pin.toml" in said
    assert not sdist_path(toy.house, toy.pin).exists()
    assert not list((toy.root / "build").rglob("toy-1.0.tar.gz"))


def test_the_cache_serves_the_next_time_and_a_damaged_one_is_replaced(toy: ToyHouse, monkeypatch):
    for key, value in toy.environment().items():
        monkeypatch.setenv(key, value)
    path = fetch(toy.house, toy.pin)
    good = path.read_bytes()
    path.write_bytes(good[:100])
    assert fetch(toy.house, toy.pin).read_bytes() == good
    (toy.links / "toy-1.0.tar.gz").unlink()
    assert fetch(toy.house, toy.pin).read_bytes() == good
