"""Replays of the toy upstream: curves, scores, trailers."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from carry import behaviour, replay, replayreport
from carry.cli import main
from carry.envs import Env, load_stack
from carry.patches import load_series
from carry.schema import fault_in
from toyhouse import CORE, FILES, make_toy

RESUME = Path(__file__).parents[1] / "resume"
TEST = """
import pytest, toy
from resume import symptoms

@pytest.mark.fault("spelling", symptom=symptoms.MastersStale)
def test_spelling():
    if toy.line_20 == 20:
        raise symptoms.MastersStale("line_20")

@pytest.mark.fault("native-two", symptom=symptoms.Diverged)
def test_native():
    from toy.native.op import op
    if op() != 2:
        raise symptoms.Diverged("op")
"""
TWENTY = FILES | {"toy/core.py": CORE.replace("line_20 = 20", "line_20 = 'twenty'")}


@pytest.fixture(scope="module")
def toy(tmp_path_factory, build_env):
    """Pin 1.0, and releases 0.9 (as it), 1.1 (an offset), 1.2 (upstream has one fix) and 1.3 (undone: as 1.0)."""
    folder = tmp_path_factory.mktemp("replay")
    made = make_toy(folder, build_env).with_series()
    made.offer("0.9")
    made.offer("1.1", FILES | {"toy/core.py": "# a line more\n" + CORE})
    made.offer("1.2", TWENTY)
    made.offer("1.3")
    package = made.root / "tests" / "resume"
    (package / "toy").mkdir()
    (package / "toy" / "__init__.py").touch()
    for name in ("__init__.py", "conftest.py", "symptoms.py", "wheel.py", "ranks.py"):
        shutil.copy(RESUME / name, package / name)
    (package / "toy" / "test_made.py").write_text(TEST)
    (made.root / "ci" / "stacks").mkdir(parents=True)
    (made.root / "ci" / "stacks" / "toy-stack.txt").write_text("# made\n")
    stack = load_stack(made.house, "toy-stack")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(behaviour, "install_stack", lambda house, name: Env(stack, Path(sys.executable), "3.11", "2"))
        for name, value in made.environment().items():
            patched.setenv(name, value)
        yield made


@pytest.fixture(scope="module")
def found(toy):
    return replay.replay(toy.house, "toy", "0.9", "1.3", "0.9,1.0,1.2,1.3")


def test_curves(found):
    text = replayreport.text(found).splitlines()
    curves = [line for line in text if line.startswith(("spelling", "native-two", "   "))]
    assert curves == [
        "native-two  applies  =====",
        "            needed   ## ##",
        "spelling    applies  ==~i=",
        "            needed   ## .#",
    ]
    assert text[0] == "toy 0.9 -> 1.3: 5 releases, 4 with behaviour"


def test_scores_count_only_what_behaviour_told(found):
    rated = {score.claim: (score.right, score.claimed, score.true) for score in replay.scores(found.points)}
    assert rated["applies as it is: needed"] == (7, 7, 7)
    assert rated["reverse-applies: not needed"] == (1, 1, 1)
    assert rated["conflicts or has no file: not needed"] == (1, 1, 1)
    assert rated["patched symbol gone or uncalled: not needed"] == (0, 0, 1)


def test_documents(toy, found):
    written = replayreport.write(toy.house, found)
    assert [path.name for path in written] == ["toy.json", "toy.html"]
    content = json.loads(written[0].read_text())
    assert fault_in(content, "replay") is None
    point = content["faults"]["spelling"][3]
    assert (point["version"], point["applies"], point["reverse_applies"], point["needed"]) == (
        "1.2",
        "conflict",
        True,
        False,
    )
    page = written[1].read_text()
    assert page.startswith("<!DOCTYPE html>") and "http" not in page and page.count("<td") == 4 * 6
    assert "1.2: conflict; reverse-applies; empty after three-way | green 1 of 1" in page


def test_a_trailer_that_behaviour_contradicts_is_found_and_mended(toy, found, capsys):
    (claim,) = [claim for claim in found.claims if claim.wrong]
    assert (claim.patch.fault, claim.wrong) == ("spelling", ("1.2",))
    assert claim.measured == (">=0.9,<1.2", ">=1.3,<=1.3")
    before = toy.patches()
    args = ["replay", "--upstream", "toy", "--from", "0.9", "--to", "1.3"]
    try:
        # without being asked for, what was run before counts
        assert main(args) == 10
        assert "is wrong in 1.2; it should be >=0.9,<1.2 and >=1.3,<=1.3" in capsys.readouterr().out
        assert main([*args, "--write"]) == 0
        first, second = load_series(toy.pin)
        assert first.affects == (">=0.9,<1.2", ">=1.3,<=1.3") and second.path.read_bytes() == before[second.path.name]
        assert main(args) == 0
    finally:
        for name, content in before.items():
            (toy.folder / name).write_bytes(content)


def test_what_was_run_is_not_run_again(toy, found, monkeypatch):
    monkeypatch.setattr(behaviour, "run_tests", lambda *args, **kwargs: pytest.fail("was run again"))
    assert replay.replay(toy.house, "toy", "0.9", "1.3", "0.9,1.0,1.2,1.3") == found


def test_a_release_that_cannot_be_run_is_a_problem_and_13(toy, found, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise behaviour.CouldNotRun("pytest ended with code 2")

    monkeypatch.setattr(behaviour, "run_tests", fails)
    assert main(["replay", "--upstream", "toy", "--from", "1.0", "--to", "1.2", "--behaviour", "all"]) == 13
    assert (
        "not run: 1.1: toy 1.1: no stack runs its tests: toy-stack: pytest ended with code 2" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--from", "", "--to", "1.0"], "from which release to which? give FROM= and TO="),
        (["--from", "1.0", "--to", "9"], "the index has no toy '9'; its newest is 1.3"),
        (["--from", "1.2", "--to", "1.0"], "1.2 comes after 1.0; give the older one first"),
        (
            ["--from", "1.0", "--to", "1.1", "--behaviour", "1.3"],
            "BEHAVIOUR names 1.3, which is not among the releases",
        ),
    ],
)
def test_bad_input_is_one_line(toy, args, what):
    done = toy.run("replay", "--upstream", "toy", *args, check=1)
    assert done.stderr.startswith(f"carry: {what}") and len(done.stderr.splitlines()) == 1
