"""A series without one of its patches: what is left out with it, what does not go on, what tests then say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from carry import leaveout
from carry.leaveout import LeftOut, chosen, dependents, leave_out
from carry.patches import load_series
from toyhouse import TRAILERS, ToyHouse

NEEDS = TRAILERS + "Depends: spelling\n"
RED = {"outcome": "red", "symptom": "X", "message": "m"}
GREEN = {"outcome": "green", "symptom": None, "message": None}


@pytest.fixture
def four(toy: ToyHouse, monkeypatch) -> ToyHouse:
    """Four patches: the second edits the line of the first, the third needs the second, the fourth is alone."""
    for name, value in toy.environment().items():
        monkeypatch.setenv(name, value)
    toy.run("apply", "toy", "1.0")
    toy.edit("toy/core.py", "line_20 = 20", "line_20 = 'twenty'")
    toy.commit("core: spell twenty", "spelling")
    toy.edit("toy/core.py", "line_20 = 'twenty'", "line_20 = 'Twenty'")
    toy.commit("core: a capital", "capital", NEEDS)
    toy.edit("toy/core.py", "line_20 = 'Twenty'", "line_20 = 'Twenty!'")
    toy.commit("core: louder", "louder", NEEDS.replace("spelling", "capital"))
    toy.edit("toy/core.py", "line_35 = 35", "line_35 = 'thirty-five'")
    toy.commit("core: spell thirty-five", "alone")
    toy.run("refresh", "toy", "1.0")
    return toy


def test_those_that_declare_to_need_it_go_with_it(four: ToyHouse):
    series = load_series(four.pin)
    assert dependents(series, "spelling") == ("capital", "louder")
    assert dependents(series, "capital") == ("louder",)
    assert dependents(series, "alone") == ()
    assert [one.stuck for one in leave_out(four.house, four.pin, run=False)] == [(), (), (), ()]
    assert "0 findings" in four.run("lint").stdout


def test_what_does_not_go_on_and_did_not_say_so_is_named(four: ToyHouse):
    louder = next(four.folder.glob("0003-*"))
    louder.write_text(louder.read_text().replace("Depends: capital\n", ""))
    done = four.run("leave-one-out", "--upstream", "toy", "--version", "1.0", "--text", check=1)
    assert "0003-core-louder.patch (line " in done.stdout
    assert "does not go on without capital: declare `Depends: capital`" in done.stdout
    assert done.stdout.rstrip().endswith("2 findings"), "without the first, too"


def test_missing_declarations_are_written_once_where_another_says_it(four: ToyHouse):
    for path in four.folder.glob("*.patch"):
        text = path.read_text()
        path.write_text(text.replace("Depends: spelling\n", "").replace("Depends: capital\n", ""))
    four.run("leave-one-out", "--upstream", "toy", "--version", "1.0", "--text", "--write", check=1)
    assert [patch.depends for patch in load_series(four.pin)] == [(), ("spelling",), ("capital",), ()]
    done = four.run("leave-one-out", "--upstream", "toy", "--version", "1.0", "--text")
    assert done.stdout.rstrip().endswith("0 findings")
    assert "0 findings" in four.run("lint").stdout


def test_a_dependence_on_nothing_earlier_is_a_finding(four: ToyHouse):
    capital = next(four.folder.glob("0002-*"))
    capital.write_text(capital.read_text().replace("Depends: spelling", "Depends: louder"))
    done = four.run("lint", check=1)
    assert "Depends 'louder' is the fault of no earlier patch of the series; write one that is" in done.stdout


def test_its_own_tests_are_red_and_nobody_elses(four: ToyHouse, monkeypatch):
    asked = []

    def observe(house, pin, series, stack, faults):
        asked.append(([patch.fault for patch in series], list(faults)))
        return {fault: {"t": RED if fault in ("spelling", "alone") else GREEN} for fault in faults}

    monkeypatch.setattr(leaveout, "observe", observe)
    found = list(leave_out(four.house, four.pin, ["spelling", "louder"], whole=True))
    assert asked == [
        (["alone"], ["spelling", "alone"]),
        (["spelling", "capital", "alone"], ["louder", *sorted(asked[1][0])]),
    ]
    assert found[0].findings() == ["alone: 1 of 1 tests fail without spelling, t for one: declare `Depends: spelling`"]
    assert (
        found[1].findings()[0]
        == "0003-core-louder.patch: all 1 tests of louder pass without it, so nothing shows its use"
    )
    path = leaveout.write(four.house, four.pin, found)
    assert [one["fault"] for one in json.loads(path.read_text())["left_out"]] == ["spelling", "louder"]
    assert not Path(f"{path}.new").exists()


def test_a_line_says_what_happened(four: ToyHouse):
    patch = load_series(four.pin)[0]
    line = LeftOut(patch, ("capital",), (), {"a": RED, "b": GREEN}, {"alone": {"t": RED}}).line()
    assert line.split() == ["spelling", "red", "1,", "green", "1", "others", "failing:", "1", "with", "capital"]


def test_a_fault_that_no_series_has(four: ToyHouse):
    assert chosen([four.pin], "louder") == [(four.pin, ["louder"])]
    done = four.run("leave-one-out", "--upstream", "toy", "--version", "1.0", "--fault", "quieter", check=1)
    assert "no fault 'quieter' in the series asked for; there is: alone, capital, louder, spelling" in done.stderr
