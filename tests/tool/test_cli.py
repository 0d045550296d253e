import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from carry.cli import COMMANDS, main
from carry.errors import CarryError, CouldNotRun, FixNeeded, NoGpu, ReviewNeeded, Undecided, UserError
from carry.paths import House, find_house
from toyhouse import ToyHouse

ROOT = Path(__file__).resolve().parents[2]


def test_each_error_has_its_exit_code():
    codes = [
        error.exit_code for error in (CarryError, UserError, ReviewNeeded, FixNeeded, Undecided, CouldNotRun, NoGpu)
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
    assert said == f"carry: bug in carry: ZeroDivisionError: by nought; please report it with build/logs/{log.name}\n"
    assert "Traceback" in log.read_text() and "in breaks" in log.read_text()


@pytest.mark.parametrize("name", ["build", "build/trees", "build/cache", "dist"])
def test_a_file_in_the_way_is_one_line(builder: ToyHouse, name: str):
    folder = builder.root / name
    if name == "build/cache":
        shutil.rmtree(folder)
    folder.parent.mkdir(exist_ok=True)
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.write_text("mine")
    command = ("apply", "toy", "1.0") if name != "dist" else ("build-wheels",)
    said = builder.run(*command, check=13).stderr.splitlines()[-1]
    assert said.startswith(f"carry: {name}") and said.endswith("; move it away or make it yours, and run again"), said
    assert folder.read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "path", "code"),
    [
        (errno.EACCES, "build/x", 13), (errno.EPERM, "dist/x", 13), (errno.EROFS, "patches/x", 13),
        (errno.EISDIR, "dist/x", 13), (errno.EISDIR, "patches/x", 3), (errno.EACCES, None, 3),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_ours_is_one_line(toy: ToyHouse, monkeypatch, capsys, number, path, code):
    def breaks(house, args):
        raise OSError(number, os.strerror(number), path and str(house.root / path))

    monkeypatch.setenv("CARRY_ROOT", str(toy.root))
    monkeypatch.setitem(COMMANDS, "doctor", COMMANDS["doctor"]._replace(run=breaks))
    assert main(["doctor"]) == code
    said = capsys.readouterr().err
    assert said.startswith(f"carry: {path}: " if code == 13 else "carry: bug in carry: ") and said.count("\n") == 1


def test_the_parts_after_an_interrupted_one_do_not_run(toy: ToyHouse, monkeypatch):
    def ended(house, args):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setenv("CARRY_ROOT", str(toy.root))
    for name, run in (("lint", ended), ("test-tool", lambda house, args: pytest.fail("was run"))):
        monkeypatch.setitem(COMMANDS, name, COMMANDS[name]._replace(run=run))
    assert main(["test"]) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


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


def make(*args: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    # what a make around these tests hands down would have ours announce its folders
    env = {key: value for key, value in (os.environ | more).items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *args], cwd=cwd, env=env, capture_output=True, text=True)


def test_make_alone_prints_every_target_with_one_line():
    targets = [line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ": ready ##" in line]
    shown = make().stdout.splitlines()
    assert [line.split()[1] for line in shown] == ["help", *targets]
    assert all(len(line.split()) > 3 for line in shown)
    names = "build-wheels test test-tool test-resume prove index serve apply refresh lint bench record"
    assert {*names.split(), "doctor", "clean"} <= set(targets)


@pytest.fixture
def door(toy: ToyHouse) -> Path:
    """The toy house with our Makefile, and a .venv that is this Python."""
    shutil.copy(ROOT / "Makefile", toy.root)
    (toy.root / "scripts").mkdir()
    (toy.root / "scripts" / "bootstrap.py").touch()
    (toy.root / ".venv" / "bin").mkdir(parents=True)
    python = toy.root / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return toy.root


def test_make_passes_its_variables_on_and_none_of_the_environments(door: Path):
    names = ("VERSION", "UPSTREAM", "FAULT", "PORT", "PYTHON")
    env = ToyHouse(door, door.parent / "links").environment(**dict.fromkeys(names, "env"))
    said = make("lint", cwd=door, **env)
    assert (said.returncode, said.stdout) == (0, "lint: 0 findings\n"), said
    said = make("lint", "UPSTREAM=toy", "VERSION=1.0", cwd=door, **env)
    assert (said.returncode, said.stdout) == (0, "lint: 0 findings\n"), said
    said = make("serve", "PORT=x", cwd=door, **env)
    assert "carry: argument --port: invalid int value: 'x'" in said.stderr
    said = make("refresh", "UPSTREAM=toy", "VERSION=1.1", cwd=door, **env)
    assert "carry: no pin toy '1.1'" in said.stderr


@pytest.mark.parametrize("name", ["a'b", 'a"b', "a`id`", "a b;id"])
def test_a_quote_in_a_value_is_part_of_it(door: Path, name: str):
    for target in ("lint", "apply"):
        said = make(target, f"UPSTREAM={name}", "VERSION=1.0", cwd=door, CARRY_ROOT=str(door))
        assert said.stderr.startswith(f"carry: no upstream {name!r} in patches/; there is: toy\n"), said


def test_make_runs_the_python_asked_for_or_that_of_the_environment(door: Path):
    (door / "scripts" / "bootstrap.py").write_text("import sys; sys.exit('bootstrap in ' + sys.executable)")
    assert f"bootstrap in {sys.executable}\n" in make("lint", f"PYTHON={sys.executable} -X utf8", cwd=door).stderr
    python = door / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\necho own >&2; exit 1\n")
    assert make("lint", cwd=door).stderr.startswith("own\n")
    python.unlink()
    python.symlink_to("gone")
    assert make("lint", cwd=door).stderr.startswith("bootstrap in ")


def test_every_target_is_one_line_that_calls_carry():
    lines = (ROOT / "Makefile").read_text().splitlines()
    for number, line in enumerate(lines):
        if ": ready ##" in line:
            assert lines[number + 1].startswith("\t@$(CARRY) "), line
            assert lines[number + 2] == "", line
