"""The text signals of patches against made releases, each in its own way changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from carry.git import git
from carry.pins import load_upstream
from carry.releases import as_pin, choose, offers
from carry.signals import prepare, probe, write_series
from carry.trees import release
from toyhouse import CORE, FILES, TRAILERS, ToyHouse

FUNCTIONS = "def called():\n    one = 1\n    two = 2\n    three = 3\n    four = 4\n    five = 5\n    return one\n"
USER = "from toy.work import called\ncalled()\n"
WORK = {"toy/work.py": FUNCTIONS, "toy/user.py": USER}


@pytest.fixture
def signals_of(toy: ToyHouse, monkeypatch):
    """Probe a series of two neighbouring edits of toy/core.py on a release with the files given."""
    for name, value in toy.environment().items():
        monkeypatch.setenv(name, value)
    toy.run("apply", "toy", "1.0")
    toy.edit("toy/core.py", "line_20 = 20", "line_20 = 'twenty'")
    toy.commit("core: spell twenty", "spelling")
    toy.edit("toy/core.py", "line_22 = 22", "line_22 = 'twenty-two'")
    toy.commit("core: spell twenty-two", "more-spelling")
    toy.run("refresh", "toy", "1.0")

    def probed(files: dict[str, str], keep=None, read=False):
        toy.offer("2.0", files)
        upstream = load_upstream(toy.house, "toy")
        offer = choose(upstream, offers(upstream), "2.0")
        pin = as_pin(toy.house, upstream, offer, ("toy-stack",), toy.root / "build" / "series")
        found = probe(toy.house, pin, prepare(toy.house, toy.pin), keep)
        return (found, pin) if read else list(found.signals)

    return probed


def core(*changes: tuple[str, str]) -> dict[str, str]:
    text = CORE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return FILES | {"toy/core.py": text}


def test_an_unchanged_file_applies(signals_of):
    first, second = signals_of(FILES)
    assert (first.text, second.text) == ("applies", "applies")
    assert first.carried and not first.in_already and not first.conflict
    assert first.words == ("applies",)


def test_lines_above_give_an_offset(signals_of):
    first, second = signals_of(core(("line_1 = 1\n", "line_0 = 0\nline_1 = 1\n")))
    assert (first.text, second.text) == ("offset", "offset") and first.carried


def test_changed_context_goes_on_three_way(signals_of):
    first, _ = signals_of(core(("line_18 = 18", "line_18 = 'changed'")))
    assert first.text == "three-way" and first.carried and first.conflict is None


def test_a_conflict_shows_file_line_and_lines(signals_of):
    first, second = signals_of(core(("line_20 = 20", "line_20 = 'upstream'")))
    assert (first.text, first.carried) == ("conflict", False)
    at = first.conflict
    assert (at.file, at.near_line) == ("toy/core.py", 20)
    assert first.patch.path.read_text().splitlines()[at.patch_line - 1].startswith("@@ -17,7 ")
    assert "line_20 = 'upstream'" in at.hunk and "line_20 = 'twenty'" in at.hunk and ">>>>>>> the patch" in at.hunk
    # the second is tried without the first then: its context is not there, and merges
    assert second.text == "three-way"


def test_what_upstream_took_reverse_applies_and_is_empty_after_a_merge(signals_of):
    first, second = signals_of(core(("line_20 = 20", "line_20 = 'twenty'")))
    assert first.reverse_applies and first.empty and first.in_already and not first.carried
    assert "reverse-applies" in first.words and "empty after three-way" in first.words
    assert second.text == "applies" and not second.in_already


def test_what_upstream_took_with_more_around_it_is_empty_only(signals_of):
    first, _ = signals_of(core(("line_20 = 20", "line_20 = 'twenty'"), ("line_17 = 17", "line_17 = 'other'")))
    assert not first.reverse_applies and first.empty and first.in_already


def test_a_file_that_is_gone(signals_of):
    first, _ = signals_of({name: text for name, text in FILES.items() if name != "toy/core.py"})
    assert (first.text, first.carried) == ("file gone", False)
    assert first.conflict.file == "toy/core.py"


def test_a_series_goes_on_without_what_is_left_out(signals_of):
    found, pin = signals_of(FILES, keep={"more-spelling"}, read=True)
    assert [patch.fault for patch, _ in found.laid] == ["more-spelling"]
    first, second = found.signals
    assert (first.text, second.text) == ("applies", "three-way")
    (patch,) = write_series(found, pin, pin.folder)
    assert patch.path.name == "0001-core-spell-twenty-two.patch"
    text = patch.path.read_text()
    assert "+line_22 = 'twenty-two'" in text and " line_20 = 20\n" in text and "Fault: more-spelling" in text


def test_nothing_is_checked_out_and_no_index_is_left(signals_of, toy: ToyHouse, tmp_path: Path):
    signals_of(FILES)
    repo = release(toy.house, toy.pin).repo
    assert git(["rev-parse", "--is-bare-repository"], repo) == "true"
    assert not (repo / "index").exists() and not (toy.root / "build" / "series").exists()


@pytest.fixture
def work(toy: ToyHouse, monkeypatch):
    """As `signals_of`, of one patch to a function that another module calls."""
    for name, value in toy.environment().items():
        monkeypatch.setenv(name, value)
    toy.offer("1.0", FILES | WORK)
    text = toy.pin_file.read_text()
    from carry.sources import file_sha256

    sha256 = next(line.split('"')[1] for line in text.splitlines() if line.startswith("sha256"))
    toy.pin_file.write_text(text.replace(sha256, file_sha256(toy.links / "toy-1.0.tar.gz")))
    toy.run("apply", "toy", "1.0")
    toy.edit("toy/work.py", "four = 4", "four = 'four'")
    toy.commit("work: spell four", "four")
    toy.run("refresh", "toy", "1.0")

    def signals(files):
        toy.offer("2.0", FILES | files)
        upstream = load_upstream(toy.house, "toy")
        offer = choose(upstream, offers(upstream), "2.0")
        pin = as_pin(toy.house, upstream, offer, ("toy-stack",), toy.root / "build" / "series")
        (found,) = probe(toy.house, pin, prepare(toy.house, toy.pin)).signals
        return found

    return signals


def test_the_patched_function_is_there_and_called(work):
    found = work(WORK)
    assert (found.gone, found.uncalled) == ((), ())


def test_the_patched_function_is_gone(work):
    found = work({"toy/work.py": FUNCTIONS.replace("called", "renamed"), "toy/user.py": USER})
    assert [str(symbol) for symbol in found.gone] == ["toy/work.py: called"] and found.uncalled == ()
    assert "toy/work.py: called is gone" in found.words
    # text alone still carries it, onto a function that nobody asked to be changed
    assert found.carried


def test_the_patched_function_is_no_longer_called(work):
    found = work({"toy/work.py": FUNCTIONS, "toy/user.py": ""})
    assert found.gone == () and [symbol.last for symbol in found.uncalled] == ["called"]


def test_date_and_trailers_survive_a_refresh(signals_of):
    found, pin = signals_of(core(("line_1 = 1\n", "line_0 = 0\nline_1 = 1\n")), read=True)
    first, _ = write_series(found, pin, pin.folder)
    text = first.path.read_text()
    assert TRAILERS.format(fault="spelling").strip() in text and "@@ -18,7 +18,7 @@" in text
    assert "Date: Sun, 13 Sep 2020 12:26:40 +0000" in text
