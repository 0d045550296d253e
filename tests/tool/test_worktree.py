import os
from pathlib import Path

import pytest
from carry.git import git
from toyhouse import STAMP, ToyHouse, make_toy


def log(tree: Path) -> list[str]:
    return git(["log", "--format=%s", "--reverse", "pristine..HEAD"], tree).splitlines()


def test_apply_lays_a_commit_per_patch_on_pristine_with_live_mirrors(series: ToyHouse):
    series.run("apply", "toy", "1.0")
    assert log(series.tree) == ["core: spell twenty", "native: return two — “quoted”"]
    assert git(["status", "--porcelain"], series.tree) == ""
    assert git(["rev-parse", "--abbrev-ref", "HEAD"], series.tree) == "series"
    for name in ("native/op.py", "toy/native/op.py", "native/new.py", "toy/native/new.py"):
        assert (series.tree / name).exists(), name
    assert "return 2" in (series.tree / "toy" / "native" / "op.py").read_text()
    assert git(["config", "user.email"], series.tree) == "maintainers@carry.invalid"


def test_apply_then_refresh_changes_no_byte(series: ToyHouse):
    before = series.patches()
    series.run("apply", "toy", "1.0")
    assert series.run("refresh", "toy", "1.0").stdout == "toy 1.0: nothing changed\n"
    assert series.patches() == before


def test_the_commits_are_the_same_on_every_machine(series: ToyHouse, tmp_path: Path):
    series.run("apply", "toy", "1.0")
    other = make_toy(tmp_path / "other")
    for name, content in series.patches().items():
        (other.folder / name).write_bytes(content)
    other.run("apply", "toy", "1.0", TZ="Asia/Tokyo", LC_ALL="C", GIT_AUTHOR_NAME="someone")
    assert git(["rev-parse", "HEAD"], series.tree) == git(["rev-parse", "HEAD"], other.tree)


def test_git_am_applies_the_files_by_hand(series: ToyHouse, tmp_path: Path):
    """Without the tool, on a plain checkout of the sdist."""
    plain = tmp_path / "plain"
    git(["clone", "--quiet", str(series.tree), str(plain)], tmp_path)
    git(["checkout", "--quiet", "-b", "by-hand", "pristine"], plain)
    who = {"GIT_COMMITTER_NAME": "me", "GIT_COMMITTER_EMAIL": "me@example.org"}
    git(["am", "--quiet", *map(str, sorted(series.folder.glob("*.patch")))], plain, env=who)
    assert log(plain) == log(series.tree)
    assert git(["show", "HEAD:native/op.py"], plain) == git(["show", "HEAD:native/op.py"], series.tree)


def test_an_edit_is_exported_and_renumbered(series: ToyHouse):
    series.run("apply", "toy", "1.0")
    git(["reset", "--quiet", "--hard", "pristine"], series.tree)
    series.edit("toy/core.py", "line_1 = 1", "line_1 = 'one'")
    series.commit("core: spell one", "one")
    done = series.run("refresh", "toy", "1.0")
    assert list(series.patches()) == ["0001-core-spell-one.patch"]
    assert sorted(Path(line).name for line in done.stdout.splitlines()) == [
        "0001-core-spell-one.patch",
        "0001-core-spell-twenty.patch",
        "0002-native-return-two-quoted.patch",
    ]
    assert series.pin_file.exists()


def test_the_export_does_not_depend_on_who_runs_it(series: ToyHouse):
    before = series.patches()
    series.run("apply", "toy", "1.0")
    for key, value in {
        "diff.noprefix": "true",
        "format.signature": "me",
        "format.numbered": "true",
        "format.attach": "true",
        "diff.context": "9",
        "diff.renames": "copies",
        "format.subjectPrefix": "RFC",
        "user.signingKey": "x",
        "diff.algorithm": "histogram",
        "format.encodeEmailHeaders": "false",
        "format.from": "true",
        "format.notes": "true",
        "diff.orderFile": "/dev/null",
        "diff.statGraphWidth": "5",
    }.items():
        git(["config", key, value], series.tree)
    series.run("refresh", "toy", "1.0", COLUMNS="40", TZ="Asia/Tokyo", LANG="C")
    assert series.patches() == before


def test_apply_refuses_uncommitted_changes(series: ToyHouse):
    series.edit("toy/core.py", "line_1 = 1", "line_1 = 'one'")
    for command in ("apply", "refresh"):
        done = series.run(command, "toy", "1.0", check=1)
        assert done.stderr == ("carry: build/trees/toy-1.0 has uncommitted changes (toy/core.py); "
                               "commit them, or undo them for good, then run again\n")  # fmt: skip
    assert "line_1 = 'one'" in (series.tree / "toy" / "core.py").read_text()


def test_apply_refuses_commits_that_no_file_holds_until_refreshed(series: ToyHouse):
    series.edit("toy/core.py", "line_1 = 1", "line_1 = 'one'")
    series.commit("core: spell one", "one")
    done = series.run("apply", "toy", "1.0", check=1)
    assert "has commits that no patch file holds; export them with `make refresh UPSTREAM=toy" in done.stderr
    said = series.run("clean", check=1).stderr
    assert said.startswith("carry: build/trees/toy-1.0 has commits that no patch file holds; export them with `carry")
    assert len(log(series.tree)) == 3
    series.run("refresh", "toy", "1.0")
    series.run("apply", "toy", "1.0")
    assert len(log(series.tree)) == 3
    series.run("clean")
    assert not (series.root / "build").exists()


@pytest.mark.parametrize("command", [("apply", "toy", "1.0"), ("clean",)])
def test_a_stash_is_not_lost(series: ToyHouse, command: tuple[str, ...]):
    who = {"GIT_COMMITTER_DATE": f"{STAMP} +0000"}
    series.edit("toy/core.py", "line_1 = 1", "line_1 = 'one'")
    git(["stash", "push", "--quiet"], series.tree, env=who)
    assert series.run(*command, check=1).stderr == (
        "carry: build/trees/toy-1.0 has a stash, which no patch file holds; commit what "
        "`git -C build/trees/toy-1.0 stash pop` brings back, or drop it with `git -C build/trees/toy-1.0 stash drop`\n"
    )
    git(["stash", "pop", "--quiet"], series.tree)
    assert "line_1 = 'one'" in (series.tree / "toy" / "core.py").read_text()
    git(["stash", "push", "--quiet"], series.tree, env=who)
    git(["stash", "drop", "--quiet"], series.tree)
    series.run(*command)


@pytest.mark.parametrize("command", [("apply", "toy", "1.0"), ("clean",)])
@pytest.mark.parametrize("refreshed", [False, True])
def test_commits_of_a_side_branch_are_not_lost(series: ToyHouse, command: tuple[str, ...], refreshed: bool):
    git(["checkout", "--quiet", "-b", "try/this"], series.tree)
    series.edit("toy/core.py", "line_1 = 1", "line_1 = 'one'")
    series.commit("core: spell one", "one")
    git(["checkout", "--quiet", "series"], series.tree)
    if refreshed:
        series.edit("toy/core.py", "line_9 = 9", "line_9 = 'nine'")
        series.commit("core: spell nine", "nine")
        series.run("refresh", "toy", "1.0")
    said = series.run(*command, check=1).stderr
    assert said.startswith("carry: build/trees/toy-1.0 has commits on branch try/this that no patch file holds; ")
    assert said.endswith("or drop them with `git -C build/trees/toy-1.0 branch -D try/this`\n")
    assert "line_1 = 'one'" in git(["show", "try/this:toy/core.py"], series.tree)
    git(["branch", "-D", "try/this"], series.tree)
    series.run(*command)


def test_commits_of_the_series_are_not_lost_while_another_branch_is_checked_out(series: ToyHouse):
    series.edit("toy/core.py", "line_1 = 1", "line_1 = 'one'")
    series.commit("core: spell one", "one")
    git(["checkout", "--quiet", "--detach", "refs/carry/applied"], series.tree)
    for command in (("apply", "toy", "1.0"), ("clean",)):
        assert "has commits on branch series that" in series.run(*command, check=1).stderr


def test_a_branch_without_commits_of_its_own_is_in_nobodys_way(series: ToyHouse):
    git(["branch", "parked", "pristine"], series.tree)
    git(["branch", "halfway", "HEAD~1"], series.tree)
    series.run("apply", "toy", "1.0")
    git(["branch", "parked", "pristine"], series.tree)
    series.run("clean")


def test_clean_leaves_a_folder_that_is_none_of_ours(toy: ToyHouse):
    toy.tree.mkdir(parents=True)
    (toy.tree / "notes").write_text("mine")
    assert "is no work tree of ours; move it away" in toy.run("clean", check=1).stderr
    assert (toy.tree / "notes").read_text() == "mine"


def test_apply_follows_files_that_changed_under_an_untouched_tree(series: ToyHouse):
    series.run("apply", "toy", "1.0")
    (series.folder / "0002-native-return-two-quoted.patch").unlink()
    series.run("apply", "toy", "1.0")
    assert log(series.tree) == ["core: spell twenty"]


def test_apply_leaves_a_folder_that_is_none_of_ours(toy: ToyHouse):
    toy.tree.mkdir(parents=True)
    (toy.tree / "notes").write_text("mine")
    assert "is no work tree of ours; move it away" in toy.run("apply", "toy", "1.0", check=1).stderr
    assert (toy.tree / "notes").read_text() == "mine"


def test_refresh_without_a_tree(toy: ToyHouse):
    done = toy.run("refresh", "toy", "1.0", check=1)
    assert "no work tree build/trees/toy-1.0; make it with `make apply UPSTREAM=toy VERSION=1.0`" in done.stderr


def test_refresh_refuses_to_export_an_edit_of_a_mirror(series: ToyHouse):
    before = series.patches()
    series.run("apply", "toy", "1.0")
    series.edit("toy/native/op.py", "return 2", "return 3")
    series.edit("native/once.py", "only", "still")
    series.commit("native: copy", "copy")
    done = series.run("refresh", "toy", "1.0", check=1)
    assert "edits toy/native/op.py, a copy; edit native/op.py instead" in done.stderr
    assert series.patches() == before


def test_refresh_refuses_an_empty_commit_and_a_merge(series: ToyHouse):
    who = {"GIT_COMMITTER_DATE": f"{STAMP} +0000"}
    git(["commit", "--quiet", "--allow-empty", "-m", "core: nothing"], series.tree, env=who)
    assert "changes no file of its own" in series.run("refresh", "toy", "1.0", check=1).stderr
    git(["reset", "--quiet", "--hard", "pristine"], series.tree)
    series.edit("toy/core.py", "line_1 = 1", "line_1 = 'one'")
    series.commit("core: one", "one")
    git(["checkout", "--quiet", "-b", "side", "pristine"], series.tree)
    series.edit("toy/core.py", "line_9 = 9", "line_9 = 'nine'")
    series.commit("core: nine", "nine")
    git(["merge", "--quiet", "--no-edit", "series"], series.tree, env=who)
    assert "has a merge commit" in series.run("refresh", "toy", "1.0", check=1).stderr


def test_refresh_refuses_in_the_middle_of_a_rebase(series: ToyHouse):
    (series.tree / ".git" / "rebase-merge").mkdir()
    assert "is in the middle of a rebase; finish or abort it" in series.run("refresh", "toy", "1.0", check=1).stderr


def test_an_interrupted_refresh_loses_nothing(series: ToyHouse, monkeypatch: pytest.MonkeyPatch):
    """Killed after the first file was put in place: the tree still has all, and the next run completes."""
    from carry import worktree

    git(["reset", "--quiet", "--hard", "pristine"], series.tree)
    for number in (1, 9):
        series.edit("toy/core.py", f"line_{number} = {number}\n", f"line_{number} = 'x'\n")
        series.commit(f"core: spell {number}", f"spell-{number}")
    real, calls = os.replace, []

    def dies(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(worktree.os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        worktree.refresh(series.house, series.pin)
    monkeypatch.undo()
    assert len(series.patches()) == 3  # two old, one new: no build accepts that
    assert "expected number 0002" in series.run("build-wheels", check=1).stderr
    series.run("refresh", "toy", "1.0")
    assert list(series.patches()) == ["0001-core-spell-1.patch", "0002-core-spell-9.patch"]
