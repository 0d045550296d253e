import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository whose project needs nothing from an index, and a pip that is a script of ours."""
    root = tmp_path / "clone"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "bootstrap.py", root / "scripts")
    (root / "pyproject.toml").write_text('[project]\nname = "carry"\nversion = "1"\n')
    return root


def bootstrap(root: Path, *, pip: str = "raise SystemExit(0)", python: str = sys.executable):
    """Run it with `-m pip` of the new environment answered by `pip`, through a sitecustomize-free stub."""
    stub = root.parent / "stub" / "pip"
    stub.mkdir(parents=True, exist_ok=True)
    (stub / "__init__.py").touch()
    (stub / "__main__.py").write_text(f"import sys\nopen({str(root.parent / 'pip.log')!r}, 'a').write('x')\n{pip}\n")
    return subprocess.run(
        [python, "-S", str(root / "scripts" / "bootstrap.py")],
        env={**os.environ, "PYTHONPATH": str(stub.parent)}, capture_output=True, text=True,
    )  # fmt: skip


def calls(root: Path) -> int:
    log = root.parent / "pip.log"
    return len(log.read_text()) if log.exists() else 0


@pytest.fixture
def quick(clone: Path, monkeypatch) -> Path:
    """`python -m venv` without its own pip: only the folder matters here."""
    text = (clone / "scripts" / "bootstrap.py").read_text()
    assert '"-m", "venv", VENV' in text
    (clone / "scripts" / "bootstrap.py").write_text(
        text.replace('"-m", "venv", VENV', '"-m", "venv", "--without-pip", VENV')
    )
    return clone


def test_the_environment_is_made_once_and_again_when_the_project_changes(quick: Path):
    done = bootstrap(quick)
    assert (done.returncode, done.stderr) == (0, "making .venv (a minute at most)\n")
    assert (quick / ".venv" / ".ready").exists() and calls(quick) == 1
    assert bootstrap(quick).stderr == "" and calls(quick) == 1
    (quick / "pyproject.toml").write_text('[project]\nname = "carry"\nversion = "2"\n')
    bootstrap(quick)
    assert calls(quick) == 2


def test_a_moved_clone_is_made_anew_by_its_own_python(quick: Path):
    bootstrap(quick)
    moved = quick.rename(quick.with_name("moved"))
    own = str(moved / ".venv" / "bin" / "python")
    done = bootstrap(moved, python=own)
    assert (done.returncode, done.stderr) == (0, "making .venv (a minute at most)\n"), done
    assert subprocess.run([own, "-c", ""]).returncode == 0
    assert bootstrap(moved, python=own).stderr == "" and bootstrap(moved).stderr == "" and calls(moved) == 2


def test_a_whole_environment_costs_next_to_nothing(quick: Path):
    import resource

    bootstrap(quick)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(5):
        bootstrap(quick)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = [a - b for a, b in zip(after[:2], before[:2], strict=True)]
    assert sum(spent) / 5 < 0.1, spent


def test_one_that_failed_or_was_killed_is_made_anew(quick: Path):
    done = bootstrap(quick, pip="raise SystemExit(1)")
    assert done.returncode == 13
    assert done.stderr.splitlines()[-1].startswith("carry: pip could not install carry's dependencies; check the")
    assert not (quick / ".venv" / ".ready").exists()
    (quick / ".venv" / "half").touch()
    assert bootstrap(quick).returncode == 0
    assert (quick / ".venv" / ".ready").exists() and not (quick / ".venv" / "half").exists()


def test_python_too_old_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "scripts" / "bootstrap.py"), run_name="__main__")
    assert stop.value.code == 13
    assert capsys.readouterr().err == (
        "carry: Python 3.9 is too old; carry needs 3.10 or newer; run `make PYTHON=python3.x` with one\n"
    )


def test_it_parses_on_any_python_3():
    """Old syntax only: no f-string, annotation or walrus, so that the line above can be printed at all."""
    import ast

    ast.parse((ROOT / "scripts" / "bootstrap.py").read_text(), feature_version=(3, 4))
    assert 'f"' not in (ROOT / "scripts" / "bootstrap.py").read_text()
