import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from carry.cli import COMMANDS, main
from carry.errors import CarryError, CouldNotRun, FixNeeded, NoGpu, ReviewNeeded, Undecided, UserError
from carry.paths import House, find_house
from toyhouse import ToyHouse

ROOT = Path(__file__).resolve().parents[2]


def test_each_error_has_its_exit_code():
    codes = [
        error.exit_code
        for error in (CarryError, UserError, ReviewNeeded, FixNeeded, Undecided, CouldNotRun, NoGpu)
    ]
    assert codes == [3, 1, 10, 11, 12, 13, 20]


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["apply", "tov", "1.0"], "no upstream 'tov' in patches/; there is: toy"),
        (["refresh", "toy", "9"], "no pin toy '9' in patches/; there is: 1.0"),
        (
            ["build-wheels", "--upstream", "toy", "--version", "9"],
            "no pin toy '9' in patches/; there is: 1.0",
        ),
        (["build-wheels", "--version", "1.0"], "VERSION=1.0 needs UPSTREAM= too"),
        (["lint", "--upstream", "tov"], "no upstream 'tov' in patches/; there is: toy"),
    ],
)
def test_an_unknown_name_is_one_line_and_leaves_nothing(toy: ToyHouse, args: list[str], what: str):
    done = toy.run(*args, check=1)
    assert done.stderr.startswith(f"carry: {what}") and len(done.stderr.splitlines()) == 1
    assert {path.name for path in (toy.root / "build").iterdir()} == {".lock"}


def test_a_bug_is_one_line_and_a_log(toy: ToyHouse, monkeypatch, capsys):
    def breaks(house, args):
        raise ZeroDivisionError("by nought")

    monkeypatch.setenv("CARRY_ROOT", str(toy.root))
    monkeypatch.setitem(COMMANDS, "doctor", COMMANDS["doctor"]._replace(run=breaks))
    assert main(["doctor"]) == 3
    (log,) = (toy.root / "build" / "logs").glob("bug-*.log")
    said = capsys.readouterr().err
    assert (
        said
        == f"carry: bug in carry: ZeroDivisionError: by nought; please report it with build/logs/{log.name}\n"
    )
    assert "Traceback" in log.read_text() and "in breaks" in log.read_text()


def test_outside_of_a_repository(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("CARRY_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is not inside a carry repository"):
        find_house()
    monkeypatch.setenv("CARRY_ROOT", str(tmp_path))
    with pytest.raises(UserError, match=r"has no patches/ folder"):
        find_house()


def test_the_root_is_found_from_below(toy: ToyHouse, monkeypatch):
    monkeypatch.delenv("CARRY_ROOT", raising=False)
    monkeypatch.chdir(toy.folder)
    assert find_house() == House(toy.root)


def test_doctor(toy: ToyHouse, tmp_path: Path):
    done = toy.run("doctor")
    assert [line.split()[:2] for line in done.stdout.splitlines()][:4] == [
        ["ok", "python"], ["ok", "git"], ["ok", "uv"], ["ok", "pip"]]  # fmt: skip
    (tmp_path / "empty").mkdir()
    done = toy.run("doctor", PATH=str(tmp_path / "empty"), check=13)
    assert "BAD  git     git is not on the PATH" in done.stdout


def test_imports_stay_lazy():
    """What `carry build-wheels` needs when nothing changed must not load what only a build needs."""
    code = "import sys, carry.cli, carry.wheels, carry.lint, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"requests", "pypi_simple", "jsonschema", "packaging"} & set(json.loads(done.stdout))


def make(*args: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(["make", *args], cwd=ROOT, env=env, capture_output=True, text=True)


def test_make_alone_prints_every_target_with_one_line():
    targets = [
        line.partition(":")[0]
        for line in (ROOT / "Makefile").read_text().splitlines()
        if ": $(READY) ##" in line
    ]
    shown = make().stdout.splitlines()
    assert [line.split()[1] for line in shown] == ["help", *targets]
    assert all(len(line.split()) > 3 for line in shown)
    names = "build-wheels test test-tool test-resume prove index serve apply refresh lint bench record"
    assert {*names.split(), "doctor", "clean"} <= set(targets)


def test_make_passes_its_variables_on():
    said = make("--dry-run", "test-resume", "UPSTREAM=toy", "VERSION=1.0", "FAULT=x").stdout
    assert ".venv/bin/carry test-resume --upstream 'toy' --version '1.0' --fault 'x'" in said
    assert ".venv/bin/carry serve --port '81'" in make("--dry-run", "serve", "PORT=81").stdout


def test_every_target_is_one_line_that_calls_carry():
    lines = (ROOT / "Makefile").read_text().splitlines()
    for number, line in enumerate(lines):
        if ": $(READY) ##" in line:
            assert lines[number + 1].startswith("\t@$(CARRY) "), line
            assert lines[number + 2] == "", line
