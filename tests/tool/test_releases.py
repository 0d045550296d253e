"""Releases as an index and a folder list them."""

from __future__ import annotations

from pathlib import Path

import pytest
from carry import releases
from carry.download import Listed
from carry.errors import UserError
from carry.pins import load_upstream
from carry.releases import as_pin, between, choose, offers, pin_below
from toyhouse import ToyHouse

SHA = "a" * 64


@pytest.fixture
def offered(toy: ToyHouse, monkeypatch):
    """toy's upstream, and what a made index offers of it."""

    def listing(project):
        assert project == "toy"
        files = ["toy-1.0.tar.gz", "toy-1.0-py3-none-any.whl", "toy-1.10.tar.gz", "toy-1.9.tar.gz", "Toy-1.2.tar.gz"]
        files += ["toy-1.11-py3-none-any.whl", "toy-2.0rc1.tar.gz", "toy-1.3+local.tar.gz", "toy-x.tar.gz"]
        made = [Listed(name, SHA, False, None) for name in files]
        return [*made, Listed("toy-1.12.tar.gz", SHA, True, None)]

    monkeypatch.setattr(releases, "listing", listing)
    upstream = load_upstream(toy.house, "toy")
    return upstream, offers(upstream)


def test_versions_are_in_their_own_order_without_what_nobody_runs(offered):
    assert list(offered[1]) == ["1.0", "1.2", "1.9", "1.10", "1.11", "1.12"]


def test_latest_is_the_newest_that_can_be_had_as_an_sdist(offered):
    assert choose(*offered, "latest").version == "1.10"


@pytest.mark.parametrize(
    ("version", "what"),
    [
        ("7", "the index has no toy '7'; its newest is 1.10"),
        ("1.12", "toy 1.12 is yanked; name another, its newest is 1.10"),
        ("1.11", "toy 1.11 has no sdist on the index, only wheels; name another release"),
    ],
)
def test_a_release_that_cannot_be_had(offered, version, what):
    with pytest.raises(UserError) as raised:
        choose(*offered, version)
    assert str(raised.value) == what


def test_between_holds_both_ends_and_nothing_yanked(offered):
    assert [offer.version for offer in between(*offered, "1.2", "latest")] == ["1.2", "1.9", "1.10"]
    with pytest.raises(UserError, match=r"1\.9 comes after 1\.2; give the older one first"):
        between(*offered, "1.9", "1.2")


def test_nothing_on_the_index(toy: ToyHouse, monkeypatch):
    monkeypatch.setattr(releases, "listing", lambda project: [])
    upstream = load_upstream(toy.house, "toy")
    with pytest.raises(UserError, match="the index has no sdist of toy; check the name"):
        choose(upstream, offers(upstream), "latest")


def test_a_release_as_a_pin(toy: ToyHouse, offered):
    upstream, known = offered
    made = as_pin(toy.house, upstream, known["1.9"], ("toy-stack",), Path("x"))
    assert (made.version, made.sdist, made.sha256, made.tag) == ("1.9", "toy-1.9.tar.gz", SHA, "v1.9")
    with pytest.raises(UserError, match=rf"toy-1\.0\.tar\.gz: the index says sha256 {SHA}, the pin "):
        as_pin(toy.house, upstream, known["1.0"], (), Path("x"))
    without = known["1.9"]._replace(sdist=known["1.9"].sdist._replace(sha256=None))
    with pytest.raises(UserError, match=r"names no sha256 for toy-1\.9\.tar\.gz; it cannot be verified"):
        as_pin(toy.house, upstream, without, (), Path("x"))


def test_the_pin_below(toy: ToyHouse):
    upstream = load_upstream(toy.house, "toy")
    assert pin_below(toy.house, upstream, "1.0") is None
    assert pin_below(toy.house, upstream, "1.0.1").version == "1.0"


def test_a_folder_is_listed_and_hashed_when_chosen(toy: ToyHouse, monkeypatch):
    for name, value in toy.environment().items():
        monkeypatch.setenv(name, value)
    toy.offer("1.1")
    (toy.links / "toyish-9.tar.gz").write_text("another project")
    upstream = load_upstream(toy.house, "toy")
    known = offers(upstream)
    assert list(known) == ["1.0", "1.1"]
    pin = as_pin(toy.house, upstream, known["1.0"], (), toy.root)
    assert pin.sha256 == toy.pin.sha256 and pin.commit == toy.pin.commit


def test_an_index_that_does_not_answer_is_13(toy: ToyHouse):
    index = {"PIP_NO_INDEX": "", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    done = toy.run("bump", "--upstream", "toy", "--version", "latest", check=13, **index)
    assert done.stderr == (
        "carry: cannot list toy: http://127.0.0.1:9/simple did not answer (connection refused); "
        "check the network and pip's index-url, then run again\n"
    )
