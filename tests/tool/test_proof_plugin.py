"""The plugin of tests/resume/conftest.py, run by a real pytest on made tests: what counts as red, green and error."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RESUME = Path(__file__).parents[1] / "resume"
PLUGIN = ("__init__.py", "conftest.py", "symptoms.py", "wheel.py", "ranks.py")
TESTS = """
import pytest
from resume import symptoms

@pytest.mark.fault("stale", symptom=symptoms.MastersStale)
def test_body():
    {body}

@pytest.mark.guard
def test_guard():
    pass

@pytest.mark.fault("other", symptom=symptoms.Hang)
def test_of_another_series():
    raise RuntimeError("must not run")
"""
RED = 'raise symptoms.MastersStale("masters w differ")'


def run(folder: Path, body: str, faults: list[str], *options: str, text: str = TESTS):
    """pytest's exit code, the outcomes, and its output."""
    package = folder / "tests" / "resume"
    package.mkdir(parents=True)
    for name in PLUGIN:
        shutil.copy(RESUME / name, package / name)
    (package / "test_made.py").write_text(text.replace("{body}", body))
    about = {"upstream": "toy", "version": "1.0", "flavour": "patched" if faults else "pristine", "faults": faults}
    (folder / "carry.json").write_text(json.dumps(about))
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(package),
         "--carry-upstream=toy", "--carry-faults=stale", f"--carry-report={report}", *options],
        env={**os.environ, "CARRY_WHEEL_JSON": str(folder / "carry.json"), "PYTHONPATH": str(folder / "tests")},
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    outcomes = {k.rpartition("::")[2]: v for k, v in json.loads(report.read_text())["outcomes"].items()}
    return done.returncode, outcomes, done.stdout + done.stderr


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_the_declared_symptom_on_pristine_is_red_and_expected(tmp_path, options):
    code, outcomes, _ = run(tmp_path, RED, [], *options)
    assert code == 0
    assert set(outcomes) == {"test_body", "test_guard"}
    assert outcomes["test_body"]["outcome"] == "red"
    assert outcomes["test_body"]["symptom"] == "MastersStale"
    assert outcomes["test_body"]["message"] == "masters w differ"
    assert outcomes["test_guard"]["outcome"] == "green"


def test_a_pass_on_patched_is_green(tmp_path):
    code, outcomes, _ = run(tmp_path, "pass", ["stale"])
    assert (code, outcomes["test_body"]["outcome"]) == (0, "green")


def test_a_pass_on_pristine_fails_the_run(tmp_path):
    code, outcomes, output = run(tmp_path, "pass", [])
    assert code == 1
    assert outcomes["test_body"]["outcome"] == "green"
    assert not outcomes["test_body"]["as_expected"]
    assert "did not show on a wheel that does not fix it" in output


def test_the_symptom_on_patched_fails_the_run(tmp_path):
    code, outcomes, _ = run(tmp_path, RED, ["stale"])
    assert (code, outcomes["test_body"]["outcome"], outcomes["test_body"]["as_expected"]) == (1, "red", False)


@pytest.mark.parametrize(
    "body",
    [
        "import no_such_module",
        'raise symptoms.WeightsNotRestored("another symptom")',
        'raise symptoms.Symptom("the base class")',
        "assert 1 == 2",
        'raise symptoms.Crash("KeyError", "x", ["KeyError"], [], True)',
    ],
    ids=["import error", "other symptom", "base class", "assertion", "crash"],
)
def test_anything_but_the_declared_symptom_is_an_error(tmp_path, body):
    code, outcomes, _ = run(tmp_path, body, [])
    assert (code, outcomes["test_body"]["outcome"]) == (1, "error")


def test_a_fixture_that_fails_is_an_error_even_with_the_declared_symptom(tmp_path):
    text = TESTS.replace("def test_body()", "def test_body(broken)") + f"\n@pytest.fixture\ndef broken():\n    {RED}\n"
    code, outcomes, _ = run(tmp_path, "pass", [], text=text)
    assert (code, outcomes["test_body"]["outcome"]) == (1, "error")


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        ('"KeyError", "dp_world_size", ["KeyError"], [], True', "red"),
        ('"KeyError", "another key", ["KeyError"], [], True', "error"),
        ('"TypeError", "dp_world_size", ["TypeError"], [], True', "error"),
        ('"KeyError", "dp_world_size", ["KeyError"], [], False', "error"),
    ],
    ids=["as declared", "other text", "other type", "not upstream's"],
)
def test_a_declared_crash_must_come_from_an_upstream_frame(tmp_path, raised, outcome):
    text = TESTS.replace("symptom=symptoms.MastersStale", 'symptom=symptoms.crash("KeyError", "dp_world_size")')
    _, outcomes, _ = run(tmp_path, f"raise symptoms.Crash({raised})", [], text=text)
    assert outcomes["test_body"]["outcome"] == outcome


def test_only_runs_no_guards(tmp_path):
    _, outcomes, _ = run(tmp_path, RED, [], "--carry-only")
    assert set(outcomes) == {"test_body"}


def test_a_wheel_of_unknown_make_is_an_error(tmp_path):
    code, outcomes, _ = run(
        tmp_path,
        RED,
        [],
        text=TESTS.replace("import pytest\n", "import pytest, os\n", 1).replace(
            "from resume import symptoms", "from resume import symptoms\nos.environ.pop('CARRY_WHEEL_JSON', None)"
        ),
    )
    assert code == 1
    assert "test_body" not in outcomes or outcomes["test_body"]["outcome"] == "error"
