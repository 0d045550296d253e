import os
import subprocess

import pytest
from carry.errors import UserError
from carry.git import environment, git
from carry.patches import apply_series, load_series
from carry.trees import changed_files, lay, release
from toyhouse import FILES, ToyHouse, make_sdist, write_pin


@pytest.fixture
def here(toy: ToyHouse, monkeypatch: pytest.MonkeyPatch) -> ToyHouse:
    for key, value in toy.environment().items():
        monkeypatch.setenv(key, value)
    return toy


def test_a_release_is_the_same_commit_everywhere(here: ToyHouse, tmp_path, monkeypatch):
    first = release(here.house, here.pin)
    monkeypatch.setenv("GIT_AUTHOR_NAME", "someone")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.autocrlf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    os.rename(here.root / "build", tmp_path / "old")
    old_umask = os.umask(0o077)
    try:
        again = release(here.house, here.pin)
    finally:
        os.umask(old_umask)
    assert (first.commit, first.tree, first.epoch) == (again.commit, again.tree, again.epoch)


def test_bytes_survive_whatever_attributes_the_sdist_brings(here: ToyHouse, tmp_path):
    odd = {**FILES, ".gitattributes": "* text eol=crlf\n*.py ident export-ignore\n", ".gitignore": "*.py\n"}
    odd["toy/odd.py"] = "a\r\nb\n$Id$\n"
    write_pin(here.pin_file, make_sdist(here.links / "toy-1.0.tar.gz", odd))
    made = release(here.house, here.pin)
    lay(made, made.tree, tmp_path / "out")
    for name, text in odd.items():
        assert (tmp_path / "out" / name).read_bytes() == text.encode(), name


def test_a_series_applies_without_checkout_and_is_carried_over_to_the_mirror(here: ToyHouse):
    here.with_series()
    applied = apply_series(here.house, here.pin, load_series(here.pin))
    assert changed_files(applied.release, applied.release.tree, applied.tree) == [
        "native/new.py",
        "native/op.py",
        "toy/core.py",
        "toy/native/new.py",
        "toy/native/op.py",
    ]
    assert set(applied.mirrored) == {"toy/native/new.py", "toy/native/op.py"}
    show = [git(["show", f"{applied.tree}:{path}native/op.py"], applied.release.repo) for path in ("", "toy/")]
    assert show[0] == show[1] == "def op():\n    return 2"


def test_a_file_that_the_sdist_ships_once_gets_no_twin(here: ToyHouse):
    here.run("apply", "toy", "1.0")
    here.edit("native/once.py", "only", "still_only")
    here.commit("native: once", "once")
    here.run("refresh", "toy", "1.0")
    applied = apply_series(here.house, here.pin, load_series(here.pin))
    assert changed_files(applied.release, applied.release.tree, applied.tree) == ["native/once.py"]


def test_a_deleted_file_is_deleted_in_the_mirror(here: ToyHouse):
    here.run("apply", "toy", "1.0")
    (here.tree / "native" / "op.py").unlink()
    here.commit("native: no op", "no-op")
    here.run("refresh", "toy", "1.0")
    applied = apply_series(here.house, here.pin, load_series(here.pin))
    assert changed_files(applied.release, applied.release.tree, applied.tree) == [
        "native/op.py",
        "toy/native/op.py",
    ]


def test_a_mirror_that_is_no_copy_is_not_overwritten(here: ToyHouse):
    other = {**FILES, "toy/native/op.py": "def op():\n    return 'other'\n"}
    write_pin(here.pin_file, make_sdist(here.links / "toy-1.0.tar.gz", other))
    here.run("apply", "toy", "1.0")
    here.edit("native/op.py", "return 1", "return 2")
    here.commit("native: two", "two")
    here.run("refresh", "toy", "1.0")
    with pytest.raises(UserError, match=r"toy/native/op.py is no copy of native/op.py"):
        apply_series(here.house, here.pin, load_series(here.pin))


def test_git_hears_nothing_of_the_users_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text("[user]\n\tname = leak\n")
    env = environment(tmp_path)
    assert "GIT_DIR" not in env and "GIT_EXTERNAL_DIFF" not in env
    done = subprocess.run(["git", "config", "user.name"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


def test_git_apply_below_a_foreign_repository_still_applies(series: ToyHouse):
    """Without GIT_CEILING_DIRECTORIES `git apply` in such a place exits 0 and changes nothing."""
    git(["init", "--quiet", "."], series.root)
    series.run("apply", "toy", "1.0")
    assert "line_20 = 'twenty'" in (series.tree / "toy" / "core.py").read_text()


def test_git_missing_is_one_line(toy: ToyHouse, tmp_path):
    (tmp_path / "empty").mkdir()
    done = toy.run("apply", "toy", "1.0", PATH=str(tmp_path / "empty"), check=13)
    assert done.stderr == "carry: git is not on the PATH; install git 2.32 or newer and run again\n"


def test_a_stale_lock_of_a_killed_git_does_not_stop_the_next_run(here: ToyHouse):
    repo = release(here.house, here.pin).repo
    (repo / "refs" / "tags").mkdir(parents=True, exist_ok=True)
    for name in ("packed-refs.lock", "config.lock", f"refs/tags/1.0-{here.pin.sha256[:16]}.lock"):
        (repo / name).touch()
    git(["update-ref", "-d", f"refs/tags/1.0-{here.pin.sha256[:16]}"], repo, ok=(0, 1, 128))
    here.run("apply", "toy", "1.0")
