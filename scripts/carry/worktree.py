"""Work trees: a series laid out as commits to edit, and exported back to patch files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from carry.errors import UserError
from carry.exports import commits, export
from carry.git import git, git_bytes
from carry.patches import load_series, series_paths
from carry.paths import House
from carry.pins import Pin
from carry.trees import RAW_BYTES, Release, release

PRISTINE = "pristine"
BRANCH = "series"
_APPLIED = "refs/carry/applied"  # HEAD as `apply` or `refresh` last left it
_MAKER = "carry maintainers", "maintainers@carry.invalid"


def tree_folder(house: House, pin: Pin) -> Path:
    return house.trees / f"{pin.upstream.name}-{pin.version}"


def apply(house: House, pin: Pin) -> Path:
    """Lay the pin's work tree: a commit per patch on the tag `pristine`, ready to edit.

    An existing tree is replaced, unless it holds work that is nowhere else: then UserError.
    """
    folder = tree_folder(house, pin)
    if folder.exists():
        _refuse_to_lose(house, pin, folder)
    series = load_series(pin)
    base = release(house, pin)
    head = commits(base, pin, series)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-", ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / folder.name
        _clone(base, head, new)
        old = Path(scratch) / "old"
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
    return folder


def refresh(house: House, pin: Pin) -> list[str]:
    """Export the pin's work tree to its patch files; returns the names of those that changed or went.

    Raises UserError where there is no work tree, where it is not clean, or where
    its commits are not a line of patches. The tree keeps its commits, so an
    interrupted run loses nothing and the next one completes it.
    """
    folder = tree_folder(house, pin)
    if not (folder / ".git").exists():
        raise UserError(f"no work tree {house.relative(folder)}; make it with `{_make('apply', pin)}`")
    _refuse_unclean(house, folder)
    _refuse_odd_history(house, pin, folder)
    head = git(["rev-parse", "HEAD"], folder)
    with tempfile.TemporaryDirectory(dir=pin.folder.parent, prefix=".refresh-") as scratch:
        fresh = export(folder, PRISTINE, head, pin, Path(scratch))
        changed = _swap_in(pin, fresh)
    git(["update-ref", _APPLIED, head], folder)
    return changed


def unexported(house: House) -> list[str]:
    """What `carry clean` must not remove: a line per work tree that holds something found nowhere else."""
    found = []
    for folder in sorted(house.trees.glob("[!.]*")):
        shown = house.relative(folder)
        if not (folder / ".git").exists():
            found.append(f"{shown} is no work tree of ours; move it away and run again")
        elif dirty := _dirty(folder):
            found.append(_uncommitted(shown, dirty))
        elif aside := _set_aside(shown, folder):
            found.append(aside)
        elif _head_moved(folder):
            found.append(_unexported(shown, "carry refresh"))
    return found


def _clone(base: Release, head: str, new: Path) -> None:
    git(
        ["init", "--quiet", "--object-format=sha1", f"--initial-branch={BRANCH}", "--template=", str(new)],
        base.repo,
    )
    info = new / ".git" / "info"
    info.mkdir(exist_ok=True)
    (info / "attributes").write_text(RAW_BYTES)
    (info / "exclude").write_text("__pycache__/\n")
    settings = {
        "user.name": _MAKER[0],
        "user.email": _MAKER[1],
        "commit.gpgSign": "false",
        "core.autocrlf": "false",
    }
    for key, value in settings.items():
        git(["config", key, value], new)
    # Every release comes along, so that a three-way merge finds the blobs a patch was made for.
    refs = [f"{base.commit}:refs/tags/{PRISTINE}", "refs/tags/*:refs/tags/upstream/*"]
    git(["update-ref", "refs/carry/export", head], base.repo)
    git(
        [
            "fetch",
            "--quiet",
            "--no-tags",
            str(base.repo.resolve()),
            "refs/carry/export:refs/carry/applied",
            *refs,
        ],
        new,
    )
    git(["update-ref", "-d", "refs/carry/export"], base.repo)
    git(["reset", "--quiet", "--hard", _APPLIED], new)


def _swap_in(pin: Pin, fresh: Sequence[Path]) -> list[str]:
    changed = []
    for path in fresh:
        dest = pin.folder / path.name
        if not dest.exists() or dest.read_bytes() != path.read_bytes():
            os.replace(path, dest)
            changed.append(dest.name)
    names = {path.name for path in fresh}
    for path in series_paths(pin):
        if path.name not in names:
            path.unlink()
            changed.append(path.name)
    return changed


def _dirty(folder: Path) -> str:
    return git(["status", "--porcelain", "--untracked-files=normal"], folder)


def _head_moved(folder: Path) -> bool:
    code, applied, _ = git_bytes(["rev-parse", "--verify", "--quiet", _APPLIED], folder, ok=(0, 1))
    return bool(code) or git(["rev-parse", "HEAD"], folder) != applied.decode().strip()


def _set_aside(shown: str, folder: Path) -> str:
    """A line on the stash, or on the first branch but HEAD's with commits of its own; empty without one."""
    current = git(["rev-parse", "--symbolic-full-name", "HEAD"], folder)
    _, applied, _ = git_bytes(["rev-parse", "--verify", "--quiet", _APPLIED], folder, ok=(0, 1))
    held = ["--not", "HEAD", *applied.decode().split(), "--tags=upstream/*", "--remotes"]
    for ref in git(["for-each-ref", "--format=%(refname)", "refs/stash", "refs/heads"], folder).splitlines():
        if ref == "refs/stash":
            return (
                f"{shown} has a stash, which no patch file holds; commit what `git -C {shown} stash pop` brings "
                f"back, or drop it with `git -C {shown} stash drop`"
            )
        if ref != current and git(["rev-list", "--max-count=1", ref, *held], folder):
            name = ref.removeprefix("refs/heads/")
            return (
                f"{shown} has commits on branch {name} that no patch file holds; bring them to the branch that is "
                f"checked out and export them, or drop them with `git -C {shown} branch -D {name}`"
            )
    return ""


def _unexported(shown: str, refresh: str) -> str:
    return (
        f"{shown} has commits that no patch file holds; export them with `{refresh}`, "
        f"or drop them with `git -C {shown} reset --hard {_APPLIED}`"
    )


def _uncommitted(shown: str, dirty: str) -> str:
    first = dirty.splitlines()[0][3:]
    return f"{shown} has uncommitted changes ({first}); commit them, or undo them for good, then run again"


def _refuse_to_lose(house: House, pin: Pin, folder: Path) -> None:
    shown = house.relative(folder)
    if not (folder / ".git").exists():
        raise UserError(f"{shown} is no work tree of ours; move it away and run again")
    _refuse_unclean(house, folder)
    aside = _set_aside(shown, folder)
    if aside:
        raise UserError(aside)
    if not _head_moved(folder):
        return
    with tempfile.TemporaryDirectory(prefix="carry-export-") as scratch:
        fresh = export(folder, PRISTINE, "HEAD", pin, Path(scratch))
        if {path.name: path.read_bytes() for path in fresh} == {
            path.name: path.read_bytes() for path in series_paths(pin)
        }:
            return
    raise UserError(_unexported(shown, _make("refresh", pin)))


def _refuse_unclean(house: House, folder: Path) -> None:
    shown = house.relative(folder)
    for busy in ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD"):
        if (folder / ".git" / busy).exists():
            raise UserError(
                f"{shown} is in the middle of a {busy.split('_')[0].split('-')[0].lower()}; "
                "finish or abort it, then run again"
            )
    dirty = _dirty(folder)
    if dirty:
        raise UserError(_uncommitted(shown, dirty))


def _refuse_odd_history(house: House, pin: Pin, folder: Path) -> None:
    shown = house.relative(folder)
    code, _, _ = git_bytes(["merge-base", "--is-ancestor", PRISTINE, "HEAD"], folder, ok=(0, 1, 128))
    if code:
        raise UserError(f"{shown}: HEAD is not on top of the tag {PRISTINE}; rebase it onto that tag")
    if git(["rev-list", "--merges", f"{PRISTINE}..HEAD"], folder):
        raise UserError(f"{shown} has a merge commit; a series is a line, so rebase it onto {PRISTINE}")
    for commit in git(["rev-list", "--reverse", f"{PRISTINE}..HEAD"], folder).split():
        _refuse_mirror_edit(pin, folder, commit, shown)


def _refuse_mirror_edit(pin: Pin, folder: Path, commit: str, shown: str) -> None:
    """A commit may bring a mirror up to date with its original, and do nothing else there."""
    args = ["diff-tree", "-r", "-z", "--no-renames", "--name-only", "--no-commit-id", commit]
    files = [file for file in git(args, folder).split("\0") if file]
    subject = git(["log", "-1", "--format=%h %s", commit], folder)
    real = False
    for file in files:
        mirror = next((mirror for mirror in pin.upstream.mirrors if file.startswith(mirror + "/")), None)
        if mirror is None:
            real = True
            continue
        original = pin.upstream.mirrors[mirror] + file[len(mirror) :]
        if _blob(folder, commit, file) != _blob(folder, commit, original):
            raise UserError(
                f"{shown}: commit {subject!r} edits {file}, a copy; edit {original} instead, the copy follows"
            )
    if not real:
        raise UserError(f"{shown}: commit {subject!r} changes no file of its own; drop it with git rebase -i")


def _blob(folder: Path, commit: str, file: str) -> str:
    return git(["--literal-pathspecs", "ls-tree", commit, "--", file], folder).partition("\t")[0]


def _make(target: str, pin: Pin) -> str:
    return f"make {target} UPSTREAM={pin.upstream.name} VERSION={pin.version}"
