"""Proofs end to end on the toy upstream: real wheels, installed by hash, real pytest runs on both flavours."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from carry import instack, proofs, report
from carry.envs import Env, load_stack
from carry.errors import UserError
from carry.index import write_index
from carry.pins import load_pin
from carry.schema import fault_in
from carry.wheels import build_all, cached_wheels

RESUME = Path(__file__).parents[1] / "resume"
TEST = """
import pytest
import toy
from resume import symptoms

@pytest.mark.fault("spelling", symptom=symptoms.MastersStale)
def test_spelling():
    if toy.line_20 == 20:
        raise symptoms.MastersStale("line_20 is a number")

@pytest.mark.fault("native-two", symptom=symptoms.Diverged)
@pytest.mark.parametrize("n", [1, 2])
def test_native(n):
    from toy.native.op import op
    if op() != 2:
        raise symptoms.Diverged(f"op gives {op()}")

@pytest.mark.guard
def test_line_1():
    assert toy.line_1 == 1
"""


@pytest.fixture
def house(builder, monkeypatch):
    """A toy house with a series of two, its tests, and this environment as the stack."""
    toy = builder.with_series()
    package = toy.root / "tests" / "resume"
    (package / "toy").mkdir()
    (package / "toy" / "__init__.py").touch()
    for name in ("__init__.py", "conftest.py", "symptoms.py", "wheel.py", "ranks.py"):
        shutil.copy(RESUME / name, package / name)
    (package / "toy" / "test_made.py").write_text(TEST)
    (package / "other").mkdir()
    (package / "other" / "__init__.py").touch()
    (package / "other" / "test_other.py").write_text("raise RuntimeError('another upstream')\n")
    (toy.root / "ci" / "stacks").mkdir(parents=True)
    (toy.root / "ci" / "stacks" / "toy-stack.txt").write_text("# made\n")
    stack, python = load_stack(toy.house, "toy-stack"), Path(sys.executable)
    monkeypatch.setattr(proofs, "install_stack", lambda house, name: Env(stack, python, "3.11.0", "2.13.0+cpu"))
    for name, value in toy.environment().items():
        monkeypatch.setenv(name, value)
    return toy.house


def prove(house, **kwargs):
    pin = load_pin(house, "toy", "1.0")
    built = build_all(house, [pin])
    write_index(cached_wheels(house, built), house.candidate)
    return proofs.prove(house, [pin], built, **kwargs)


def edit(house, old, new):
    path = house.tests / "resume" / "toy" / "test_made.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_series_is_proven_and_the_proof_written(house):
    (result,) = prove(house)
    assert result.proven
    document = json.loads(result.path.read_text())
    assert fault_in(document, "proof") is None
    assert {name: entry["verdict"] for name, entry in document["faults"].items()} == {
        "spelling": "proven",
        "native-two": "proven",
    }
    spelling = document["faults"]["spelling"]["tests"][0]
    assert (spelling["pristine"]["outcome"], spelling["pristine"]["symptom"]) == ("red", "MastersStale")
    assert spelling["patched"]["outcome"] == "green"
    assert [guard["pristine"]["outcome"] for guard in document["guards"]] == ["green"]
    assert report.failures([document]) == []
    assert "red 2/2 (Diverged)" in report.table([document])
    assert not list(result.path.parent.glob("*.new"))


def test_a_fault_whose_test_passes_on_pristine_is_unproven(house):
    edit(house, "if op() != 2:", "if False:")
    (result,) = prove(house)
    assert not result.proven
    assert result.document["faults"]["native-two"]["verdict"] == "unproven"
    assert result.document["faults"]["spelling"]["verdict"] == "proven"
    assert any(
        "native-two" in line and "green on pristine, not red" in line for line in report.failures([result.document])
    )


def test_a_patch_that_does_not_fix_is_unproven(house):
    edit(house, "if toy.line_20 == 20:", "if True:")
    (result,) = prove(house)
    assert result.document["faults"]["spelling"]["verdict"] == "unproven"
    assert any("red on patched, not green" in line for line in report.failures([result.document]))


def test_an_import_error_is_no_red(house):
    edit(house, "import toy\n", "import toy, no_such_module\n")
    with pytest.raises(proofs.CouldNotRun, match="for another reason than a test; see build/logs/prove-toy"):
        prove(house)
    assert not house.proofs.exists()


def test_a_red_guard_makes_the_whole_unproven(house):
    edit(house, "toy.line_1 == 1", "toy.line_20 == 20")
    (result,) = prove(house)
    assert result.document["verdict"] == "unproven"
    assert any("guard" in line and "error on patched" in line for line in report.failures([result.document]))


def test_one_fault_runs_its_tests_only_and_writes_nothing(house):
    (result,) = prove(house, fault="spelling")
    assert set(result.document["faults"]) == {"spelling"}
    assert result.document["guards"] == []
    assert result.path is None
    assert not house.proofs.exists()


def test_an_unknown_fault_names_those_there_are(house):
    with pytest.raises(UserError, match=r"no fault 'speling'.*native-two, spelling"):
        prove(house, fault="speling")


def test_tests_run_against_the_installed_wheel_not_the_tree(house):
    edit(house, "assert toy.line_1 == 1", "assert 'sites' in toy.__file__ and 'build' in toy.__file__")
    (result,) = prove(house)
    assert result.proven


def test_the_hash_of_tests_follows_every_file_that_runs_and_no_other(house):
    before = proofs.tests_sha256(house, "toy")
    (house.tests / "resume" / "other" / "test_other.py").write_text("")
    assert proofs.tests_sha256(house, "toy") == before
    (house.tests / "resume" / "ranks.py").write_text("changed = 1\n")
    assert proofs.tests_sha256(house, "toy") != before


def record(house):
    readme = house.root / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    return report.record(house, [load_pin(house, "toy", "1.0")]), readme


def test_record_keeps_the_proof_and_renders_the_readme(house):
    prove(house)
    written, readme = record(house)
    kept = house.patches / "toy" / "1.0" / "proof.json"
    assert set(written) == {kept, readme}
    assert "duration_s" not in kept.read_text()
    assert fault_in(json.loads(kept.read_text()), "proof") is None
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| `spelling` | toy 1.0 | red 1/1 (MastersStale) | green 1/1 | toy-stack, torch 2.13.0+cpu |" in text
    assert report.record(house, [load_pin(house, "toy", "1.0")]) == []


def test_record_refuses_what_is_missing_unproven_or_of_another_series(house):
    with pytest.raises(UserError, match=r"no proof .*make prove UPSTREAM=toy VERSION=1.0"):
        record(house)
    (result,) = prove(house)
    for change, words in (
        ({"verdict": "unproven"}, "says unproven"),
        ({"series_sha256": "0" * 64}, "the series changed since"),
    ):
        result.path.write_text(json.dumps(result.document | change))
        with pytest.raises(UserError, match=words):
            record(house)
    assert not (house.patches / "toy" / "1.0" / "proof.json").exists()


def test_a_readme_without_its_marks_is_a_clear_error(house):
    prove(house)
    (house.root / "README.md").write_text("no marks\n")
    with pytest.raises(UserError, match=r"README\.md: no <!-- status"):
        report.record(house, [load_pin(house, "toy", "1.0")])


def test_a_pytest_that_cannot_start_is_named(house, monkeypatch):
    (house.tests / "resume" / "conftest.py").write_text("raise SystemExit('broken')\n")
    with pytest.raises(proofs.CouldNotRun, match="for another reason than a test; see build/logs/prove-toy"):
        prove(house)
    assert not house.proofs.exists()
    assert os.listdir(house.build / "logs")


def test_lint_refuses_a_stale_proof_and_a_readme_that_does_not_show_it(house):
    from carry.lint import lint

    assert lint(house) == []
    prove(house)
    _, readme = record(house)
    assert lint(house) == []
    readme.write_text(readme.read_text().replace("red 1/1", "red 2/2"))
    assert lint(house) == ["README.md:1: the status table is not that of the committed proofs; run `make record`"]
    kept = house.patches / "toy" / "1.0" / "proof.json"
    document = json.loads(kept.read_text())
    for change, words in (({"revision": 7}, "stale: of revision 7"), ({"lane": "tpu"}, "malformed at $.lane")):
        kept.write_text(json.dumps(document | change))
        (finding,) = lint(house)
        assert finding.startswith("patches/toy/1.0/proof.json:1: ") and words in finding


def test_an_interrupted_run_writes_no_proof_and_leaves_no_process(house, monkeypatch):
    edit(
        house,
        "assert toy.line_1 == 1",
        "import time, os; open(os.environ['TOY_PID'], 'w').write(str(os.getpid())); time.sleep(600)",
    )
    pid = house.root / "pid"
    monkeypatch.setenv("TOY_PID", str(pid))

    def say(line):
        deadline = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(instack, "say", say)
    with pytest.raises(KeyboardInterrupt):
        prove(house)
    assert not house.proofs.exists()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid.read_text()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_a_run_that_never_ends_is_ended_and_named(house, monkeypatch):
    edit(house, "assert toy.line_1 == 1", "import time; time.sleep(600)")
    monkeypatch.setattr(proofs, "_LIMIT_S", 8)
    with pytest.raises(proofs.CouldNotRun, match=r"more than 0 minutes; see build/logs/prove-toy"):
        prove(house)
    assert not house.proofs.exists()


def test_a_proof_is_stale_when_the_series_the_tests_or_the_stack_change(house):
    pin = load_pin(house, "toy", "1.0")
    report.check_current(house, [pin])
    (result,) = prove(house)
    report.check_current(house, [pin])
    edit(house, "toy.line_1 == 1", "toy.line_1 != 2")
    with pytest.raises(UserError, match=r"toy-stack.json is stale: the tests changed since; run `make prove"):
        report.check_current(house, [pin])
    (house.stacks / "toy-stack.txt").write_text("# another\n")
    with pytest.raises(UserError, match="the tests and the stack changed"):
        report.record(house, [pin])
    result.path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        report.check_current(house, [pin])
