from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from carry import loadbench
from carry.measure import Cost, Goal, Result, Round, cost, table
from carry.schema import fault_in
from toyhouse import FILES, ToyHouse, make_sdist, make_toy, write_pin
from wheelmaker import make_wheel

NAMES = {"unchanged", "apply", "probe", "replay", "environment"}


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory, build_env: Path) -> tuple[ToyHouse, str]:
    """A toy release big enough that a checkout costs something, its stack, and `carry bench` run once."""
    toy = make_toy(tmp_path_factory.mktemp("bench"), build_env)
    # many files, as a release has: a checkout writes each, an index lists them
    more = {f"docs/{number}.txt": f"page {number}\n" * 50 for number in range(400)}
    write_pin(toy.pin_file, make_sdist(toy.links / "toy-1.0.tar.gz", {**FILES, **more}))
    wheels = [
        make_wheel(toy.links, "torch", "2.0"),
        *(make_wheel(toy.links, f"part{n}", "1") for n in range(20)),
    ]
    lock = toy.root / "ci" / "stacks" / "toy-stack.txt"
    lock.parent.mkdir(parents=True)
    lock.write_text("".join(f"{_pinned(wheel)}\n" for wheel in wheels))
    toy.with_series()
    done = toy.run("bench", "--rounds", "1", UV_CACHE_DIR=str(toy.root.parent / "uv"))
    return toy, done.stdout


def _pinned(wheel: Path) -> str:
    name, version, _ = wheel.name.split("-", 2)
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


def documents(toy: ToyHouse) -> dict[str, dict]:
    found = [json.loads(path.read_bytes()) for path in (toy.root / "dist" / "bench").iterdir()]
    return {document["name"]: document for document in found}


def test_every_comparison_is_written_by_the_schema_and_shown(benched: tuple[ToyHouse, str]):
    toy, shown = benched
    written = documents(toy)
    assert written.keys() == NAMES
    assert {path.name for path in (toy.root / "dist" / "bench").iterdir()} == {f"{name}.json" for name in NAMES}
    for document in written.values():
        assert fault_in(document, "bench") is None
        assert len(document["rounds"]) == 1
        row = next(line for line in shown.splitlines() if line.startswith(document["what"]["ours"]))
        assert document["what"]["peer"] in row
        assert f"{document['ratio']['cpu_s']:.3f}" in row
        assert ("MISSED" in row) != document["goal"]["met"]


def test_nothing_changed_is_much_cheaper_than_a_full_build(benched: tuple[ToyHouse, str]):
    assert documents(benched[0])["unchanged"]["ratio"]["cpu_s"] < 0.6


def test_a_probe_in_an_index_is_cheaper_than_in_a_checkout(benched: tuple[ToyHouse, str]):
    assert documents(benched[0])["probe"]["ratio"]["cpu_s"] < 0.8


def test_all_text_signals_cost_no_multiple_of_a_naive_loop(benched: tuple[ToyHouse, str]):
    assert documents(benched[0])["replay"]["ratio"]["cpu_s"] < 2


def test_applying_costs_no_multiple_of_git_am(benched: tuple[ToyHouse, str]):
    assert documents(benched[0])["apply"]["ratio"]["cpu_s"] < 3


def test_a_second_environment_costs_no_more_than_a_first(benched: tuple[ToyHouse, str]):
    assert documents(benched[0])["environment"]["ratio"]["cpu_s"] < 1


def test_nothing_else_of_the_house_is_touched(benched: tuple[ToyHouse, str]):
    toy, _ = benched
    assert {path.name for path in (toy.root / "dist").iterdir()} == {"bench"}
    assert not [path for path in (toy.root / "build" / "bench").iterdir() if path.name != ".lock"]
    assert not (toy.root / "build" / "envs").exists()


def test_without_a_series_there_is_nothing_to_measure(toy: ToyHouse):
    said = toy.run("bench", check=1).stderr
    assert said == "carry: nothing to measure: no pin has patches; write one with `make apply`\n"


def test_a_round_at_least(series: ToyHouse):
    assert "ask for 1 or more" in series.run("bench", "--rounds", "0", check=1).stderr


def test_a_stack_that_is_not_there_is_told_before_anything_is_measured(series: ToyHouse):
    said = series.run("bench", check=1).stderr
    assert said == "carry: no stack 'toy-stack' in ci/stacks/; there is: none\n"


def test_cost_counts_child_processes():

    spin = "import time\nwhile time.process_time() < 0.3: pass"
    found = cost(lambda: subprocess.run([sys.executable, "-c", spin], check=True))
    assert 0.3 <= found.cpu_s < 3
    assert cost(lambda: None).cpu_s < 0.1


def test_medians_and_goals():
    rounds = tuple(Round(Cost(ours, 1.0), Cost(2.0, 4.0)) for ours in (1.0, 9.0, 1.5))
    result = Result("x", "ours", "theirs", Goal("ratio", 0.75), rounds)
    assert (result.median("ours", "cpu_s"), result.ratio("cpu_s"), result.ratio("wall_s")) == (
        1.5,
        0.75,
        0.25,
    )
    assert result.met
    missed = Result("x", "ours", "theirs", Goal("ours_cpu_s", 1.4), rounds)
    assert not missed.met
    assert [line.split()[-4:] for line in table([result, missed]).splitlines()[1:3]] == [
        ["<=", "0.75", "met", "0.250"],
        ["of", "ours", "MISSED", "0.250"],
    ]


def test_a_load_that_costs_more_than_it_may_is_missed():
    def measures(wall, read):
        return {"wall_s": [wall, wall * 2, wall], "cpu_s": [1.0], "bytes_read": [read], "peak_bytes": [50e6]}

    same = loadbench.Load("full-z1", {"pristine": measures(1.0, 100e6), "patched": measures(1.0, 100e6)})
    more = loadbench.Load("full-z2", {"pristine": measures(1.0, 100e6), "patched": measures(0.5, 200e6)})
    assert same.met and not more.met
    assert (more.ratio("wall_s"), more.ratio("bytes_read")) == (0.5, 2.0)
    lines = loadbench.table("deepspeed 1.0", [same, more]).splitlines()
    assert lines[1].split()[-1] == "met" and lines[2].split()[-1] == "MISSED"
    assert "200.00 MB  2.00" in lines[2]
