"""The gate end to end on the toy upstream: one release that does something else to every patch of a series."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from carry import behaviour, bump, bumpreport
from carry.actions import annotation
from carry.cli import main
from carry.envs import Env, load_stack
from carry.errors import CouldNotRun, UserError
from carry.lint import lint
from carry.pins import load_pin
from carry.schema import fault_in
from toyhouse import CORE, FILES, ToyHouse, make_toy, write_pin

RESUME = Path(__file__).parents[1] / "resume"
ROW = "line_20 = 20"


def changed(*changes: tuple[str, str], end: str = "") -> str:
    text = CORE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text + end


FIXED = (ROW, "line_20 = 'twenty'")
SEEN = "import os, pathlib\nseen = pathlib.Path(os.environ['TOY_SEEN'])\n"
SEEN += "line_20 = 20 if seen.exists() else 1\nseen.touch()\n"
# fault -> what its module becomes in 2.0, the verdict, and words of the reason
CASES = {
    "stays": (CORE, "carry", "works (applies)"),
    "moves": (changed(("line_1 = 1\n", "line_0 = 0\nline_1 = 1\n")), "carry", "works (offset)"),
    "merges": (changed(("line_18 = 18", "line_18 = 'other'")), "rebase", "works (three-way)"),
    "taken": (changed(FIXED), "drop", "reverse-applies, empty after three-way"),
    "done-otherwise": (changed(end="line_20 = 'otherwise'\n"), "drop", "text: applies"),
    "collides": (changed((ROW, "line_20 = 'half'")), "fix", "needed, but conflict"),
    "undone": (changed(FIXED, end="line_20 = 20\n"), "fix", "nothing of it is left to apply"),
    "outlived": (changed(end="line_20 = 20\n"), "fix", "no longer works: patched red 1 of 1"),
    "breaks": (changed(end="raise ValueError('broken')\n"), "undecided", "other symptom: ValueError: broken"),
    "wavers": (changed(end=SEEN), "undecided", "flaky"),
}
OTHERS = {"appears": "anew", "shares": "shared", "lacks": "absent"}
TEST = f"""
import importlib
import pytest
from resume import symptoms

@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.fault(name, symptom=symptoms.MastersStale)) for name in {[*CASES, *OTHERS]}])
def test_it(name):
    if importlib.import_module("toy." + name.replace("-", "_")).line_20 in (20, "half"):
        raise symptoms.MastersStale("line_20")
"""


def module(fault: str) -> str:
    return f"toy/{fault.replace('-', '_')}.py"


def files(*others: str, **changes: str) -> dict[str, str]:
    """toy's files with a module for each fault, of 1.0 but for `changes`; of `others` those with their fault."""
    made = {module(fault): changes.get(fault, CORE) for fault in CASES}
    return FILES | made | {module(fault): CORE if fault in others else changed(FIXED) for fault in OTHERS}


def series(toy: ToyHouse, version: str, faults, old: str = ROW) -> None:
    toy.run("apply", "toy", version)
    for fault in faults:
        path = toy.root / "build" / "trees" / f"toy-{version}" / module(fault)
        path.write_text(path.read_text().replace(*FIXED))
        at = SimpleNamespace(tree=toy.root / "build" / "trees" / f"toy-{version}")
        ToyHouse.commit(at, f"{fault}: spell twenty", fault)
    toy.run("refresh", "toy", version)


def pin(toy: ToyHouse, version: str, content: dict[str, str]) -> None:
    from carry.sources import file_sha256

    toy.offer(version, content)
    folder = toy.root / "patches" / "toy" / version
    folder.mkdir(exist_ok=True)
    sha256 = file_sha256(toy.links / f"toy-{version}.tar.gz")
    write_pin(folder / "pin.toml", sha256)
    text = (folder / "pin.toml").read_text()
    (folder / "pin.toml").write_text(text.replace("1.0", version))


@pytest.fixture(scope="module")
def gate(tmp_path_factory, build_env):
    """A house with pins 1.0 and 1.5 and a release 2.0; `toy` of this environment as its only stack."""
    folder = tmp_path_factory.mktemp("gate")
    toy = make_toy(folder, build_env)
    pin(toy, "1.0", files("shares"))
    pin(toy, "1.5", files("shares", "appears", "lacks"))
    series(toy, "1.0", CASES)
    series(toy, "1.5", OTHERS)
    toy.offer("2.0", files("shares", "appears", **{fault: case[0] for fault, case in CASES.items()}))
    package = toy.root / "tests" / "resume"
    (package / "toy").mkdir()
    (package / "toy" / "__init__.py").touch()
    for name in ("__init__.py", "conftest.py", "symptoms.py", "wheel.py", "ranks.py"):
        shutil.copy(RESUME / name, package / name)
    (package / "toy" / "test_made.py").write_text(TEST)
    (toy.root / "ci" / "stacks").mkdir(parents=True)
    (toy.root / "ci" / "stacks" / "toy-stack.txt").write_text("# made\n")
    stack = load_stack(toy.house, "toy-stack")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(behaviour, "install_stack", lambda house, name: Env(stack, Path(sys.executable), "3.11", "2"))
        for name, value in toy.environment(TOY_SEEN=str(folder / "seen")).items():
            patched.setenv(name, value)
        yield toy


@pytest.fixture(scope="module")
def outcome(gate):
    return bump.bump(gate.house, "toy", "2.0", "1.0")


def judged(outcome, fault):
    return next(one for one in outcome.judged if one.patch.fault == fault)


@pytest.mark.parametrize("fault", CASES)
def test_verdict(outcome, fault):
    _, name, words = CASES[fault]
    found = judged(outcome, fault).verdict
    assert (found.name, words in found.reason) == (name, True), found


@pytest.mark.parametrize("fault", ["done-otherwise", "undone", "outlived", "wavers"])
def test_what_contradicts_the_text_was_run_twice(outcome, fault):
    seen = judged(outcome, fault).behaviour
    assert 2 in (len(seen.pristine), len(seen.patched))


def test_other_faults_of_the_set(outcome):
    assert {other.fault: other.standing for other in outcome.others} == OTHERS


def test_the_series_that_follows_holds_what_works_and_was_tested_so(outcome):
    assert [patch.fault for patch in outcome.series] == ["stays", "moves", "merges"]
    assert (outcome.stack, outcome.exit_code, outcome.problem) == ("toy-stack", 11, "")


def test_a_second_run_runs_nothing(gate, outcome, monkeypatch):
    monkeypatch.setattr(behaviour, "run_tests", lambda *args, **kwargs: pytest.fail("was run again"))
    assert bump.bump(gate.house, "toy", "2.0", "1.0") == outcome


def test_reports(gate, outcome):
    written = bumpreport.write(gate.house, outcome)
    folder = gate.house.dist / "bump" / "toy-1.0-2.0"
    assert written == [folder / "report.json", folder / "report.md"] and sorted(folder.iterdir()) == written
    content = json.loads(written[0].read_text())
    assert fault_in(content, "bump") is None and content["exit_code"] == 11
    assert {one["fault"]: one["verdict"] for one in content["patches"]} == {f: case[1] for f, case in CASES.items()}
    text = written[1].read_text()
    assert text.startswith("### toy 1.0 -> 2.0: 2 carry, 1 rebase, 2 drop, 3 fix, 2 undecided, new in it: appears (")
    assert "| **drop** | `taken` | conflict; reverse-applies; empty after three-way | green 1 of 1 | not run |" in text
    assert "<details><summary>patches/toy/1.0/0006-" in text and "```diff\n" in text and "line_20 = 'half'" in text
    assert "`appears`: new in this release; a patch is in `patches/toy/1.5/0001-" in text
    table = bumpreport.table(outcome)
    assert "fix: outlived: needed, goes on (applies), but no longer works" in table


def test_annotations_are_at_the_patch_file_and_line(gate, outcome):
    found = bumpreport.annotations(gate.house, outcome)
    assert len(found) == 9  # all but what is carried, and the new one
    (collides,) = (line for line in found if "fix in 2.0%3A collides" in line)
    path, line = collides.split("file=")[1].split(",line=")[0], int(collides.split(",line=")[1].split(",")[0])
    assert collides.startswith("::error file=patches/toy/1.0/0006-")
    assert (gate.root / path).read_text().splitlines()[line - 1].startswith("@@ -17,7 ")
    (taken,) = (line for line in found if "drop in 2.0%3A taken" in line)
    line = int(taken.split(",line=")[1].split(",")[0])
    assert (gate.folder / taken.split("/")[3].split(",")[0]).read_text().splitlines()[line - 1] == "Fault: taken"
    assert annotation("error", "a", 1, "t", "50%\nx") == "::error file=a,line=1,title=t::50%25%0Ax"


def test_write_lays_the_new_pin_and_leaves_the_old_one_alone(gate, outcome):
    before = gate.patches() | {"pin.toml": gate.pin_file.read_bytes()}
    folder = gate.root / "patches" / "toy" / "2.0"
    try:
        assert bump.write_pin(gate.house, outcome) == folder
        new = load_pin(gate.house, "toy", "2.0")
        assert (new.sha256, new.stacks, new.revision) == (outcome.target.sha256, ("toy-stack",), 1)
        text = (folder / "pin.toml").read_text()
        assert "# Left out: taken: drop: not needed" in text and "# Left out: collides: fix: " in text
        assert "# Not carried: appears: the release has it (anew)" in text
        assert sorted(p.name for p in folder.glob("*.patch")) == [
            f"{number:04}-{fault}-spell-twenty.patch" for number, fault in enumerate(("stays", "moves", "merges"), 1)
        ]
        assert lint(gate.house, "toy", "2.0") == []
        with pytest.raises(UserError, match=r"patches/toy/2\.0 is there already and stays as it is"):
            bump.write_pin(gate.house, outcome)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert gate.patches() | {"pin.toml": gate.pin_file.read_bytes()} == before
    assert sorted(p.name for p in folder.parent.iterdir()) == ["1.0", "1.5", "upstream.toml"]


def test_a_write_that_fails_leaves_nothing(gate, outcome, monkeypatch):
    def full(patch, version):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bump, "_with_version", full)
    with pytest.raises(OSError):
        bump.write_pin(gate.house, outcome)
    assert sorted(p.name for p in (gate.root / "patches" / "toy").iterdir()) == ["1.0", "1.5", "upstream.toml"]


def test_a_range_that_leaves_the_release_out_gets_a_line(gate, outcome):
    (patch, *_) = outcome.series
    assert bump._with_version(patch, "2.0") == patch.path.read_bytes()
    with_line = bump._with_version(patch, "0.1").decode()
    assert "Affects: >=0.9\nAffects: ==0.1\nUpstream-Status: Pending\n" in with_line


@pytest.mark.parametrize(
    ("names", "anew", "problem", "code"),
    [
        (["carry", "carry"], False, "", 0),
        (["carry", "rebase"], False, "", 10),
        (["carry", "drop"], False, "", 10),
        (["carry"], True, "", 10),
        (["drop", "undecided"], False, "", 12),
        (["undecided", "fix", "drop"], False, "", 11),
        (["undecided"], False, "no stack", 13),
    ],
)
def test_exit_code(names, anew, problem, code):
    ones = tuple(SimpleNamespace(verdict=SimpleNamespace(name=name)) for name in names)
    others = (SimpleNamespace(standing="anew"),) if anew else ()
    assert bump.Outcome(None, None, "s", 6, ones, others, problem).exit_code == code


def test_the_command_ends_with_the_code_and_annotates_for_github(gate, outcome, monkeypatch, capsys):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert main(["bump", "--upstream", "toy", "--version", "latest", "--pin", "1.0"]) == 11
    said = capsys.readouterr().out
    assert "::error file=patches/toy/1.0/" in said and "report   dist/bump/toy-1.0-2.0/report.json" in said


def test_a_release_that_nothing_runs_is_13_with_its_signals(gate, monkeypatch, capsys):
    def fails(house, name):
        raise CouldNotRun("the index did not answer")

    monkeypatch.setattr(behaviour, "install_stack", fails)
    gate.offer("2.1", files())
    try:
        assert main(["bump", "--upstream", "toy", "--version", "2.1", "--pin", "1.0", "--write"]) == 13
    finally:
        (gate.links / "toy-2.1.tar.gz").unlink()
    said = capsys.readouterr().out
    assert "toy 2.1: no stack runs its tests: toy-stack: the index did not answer" in said
    assert said.count("undecided") >= len(CASES) and "applies" in said
    content = json.loads((gate.house.dist / "bump" / "toy-1.0-2.1" / "report.json").read_text())
    assert content["exit_code"] == 13 and content["stack"] is None and fault_in(content, "bump") is None
    assert not (gate.root / "patches" / "toy" / "2.1").exists()


@pytest.mark.parametrize(
    ("args", "code", "what"),
    [
        (["--version", "9.9"], 1, "the index has no toy '9.9'; its newest is 2.0"),
        (["--version", "1.0"], 1, "no pin of toy is older than 1.0; there is: 1.0, 1.5"),
        (["--version", "1.0", "--pin", "1.5"], 1, "pin 1.5 is not older than 1.0; name an older one with PIN="),
        (["--version", "2.0", "--pin", "1.1"], 1, "no pin toy '1.1' in patches/; there is: 1.0, 1.5"),
        (["--version", ""], 1, "which release? give VERSION=, such as VERSION=latest"),
        (["--version", "2.0", "--tests", "-1"], 1, "-1 tests of each fault cannot be run"),
        (["--version", "2.0", "--tests", "x"], 1, "argument --tests: invalid number value: 'x'"),
    ],
)
def test_bad_input_is_one_line(gate, args, code, what):
    done = gate.run("bump", "--upstream", "toy", *args, check=code)
    assert done.stderr.startswith(f"carry: {what}") and len(done.stderr.splitlines()) == 1
    assert not done.stdout
