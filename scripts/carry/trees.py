"""Upstream releases as commits of one bare git repository, and series applied to them.

Nothing here checks out a release to try something: a temporary index is enough
for `git apply --cached`, and costs a tenth.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from carry.errors import UserError
from carry.git import GitFailed, git, git_bytes
from carry.paths import House
from carry.pins import Pin, Upstream
from carry.sources import fetch, release_time, unpack

_MAKER = "carry", "maintainers@carry.invalid"
RAW_BYTES = "* -text -ident -filter -working-tree-encoding !diff !merge !eol !export-subst !export-ignore\n"


@dataclass(frozen=True)
class Release:
    """One upstream release in the repository `repo`: its commit, tree, and date (seconds since 1970)."""

    repo: Path
    commit: str
    tree: str
    epoch: int


class ApplyFailed(UserError):
    """git could not apply a patch: `patch` is its path, `file` the upstream file, `old_line` the line
    in it where the failing hunk expects to start (0: not about a hunk)."""

    def __init__(self, patch: Path, file: str, old_line: int, said: str):
        self.patch, self.file, self.old_line, self.said = patch, file, old_line, said
        super().__init__(f"{patch.name} does not apply to {file}: {said}")


def repository(house: House, upstream: Upstream) -> Path:
    """The bare repository of `upstream`, made where it is not there yet.

    The caller holds the lock on build/, so a *.lock file in it is one that a killed run left.
    """
    repo = house.cache / "git" / f"{upstream.name}.git"
    if repo.exists():
        for stale in [*repo.glob("*.lock"), *repo.glob("refs/**/*.lock")]:
            stale.unlink()
        return repo
    repo.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=repo.parent, prefix=".new-") as scratch:
        made = Path(scratch) / "repo.git"
        git(["init", "--quiet", "--bare", "--object-format=sha1", "--template=", str(made)], repo.parent)
        (made / "info").mkdir(exist_ok=True)
        (made / "info" / "attributes").write_text(RAW_BYTES)
        os.replace(made, repo)
    return repo


def release(house: House, pin: Pin) -> Release:
    """The pin's release as a commit, made from its sdist where it is not there yet.

    The commit is the same on every machine: fixed author, the release's date.
    Raises as `sources.fetch` and `sources.unpack`.
    """
    repo = repository(house, pin.upstream)
    ref = f"refs/tags/{pin.version}-{pin.sha256[:16]}"
    found = _known(repo, ref)
    if found:
        return found
    sdist = fetch(house, pin)
    with tempfile.TemporaryDirectory(dir=house.cache, prefix=".unpack-") as scratch:
        folder = Path(scratch) / f"{pin.upstream.file_name}-{pin.version}"
        unpack(sdist, folder)
        epoch = release_time(folder)
        env = {"GIT_INDEX_FILE": str(Path(scratch) / "index"), "GIT_DIR": str(repo)}
        git(["--work-tree=.", "add", "--all", "--force", "."], folder, env=env)
        tree = git(["write-tree"], folder, env=env)
    message = f"{pin.upstream.name} {pin.version}\n\nSdist: {pin.sdist}\nSha256: {pin.sha256}\n"
    commit = commit_tree(repo, tree, [], message, dates=(epoch, epoch))
    git(["update-ref", ref, commit], repo)
    return Release(repo, commit, tree, epoch)


def _known(repo: Path, ref: str) -> Release | None:
    code, out, _ = git_bytes(["log", "-1", "--no-show-signature", "--format=%H %T %ct", ref, "--"], repo, ok=(0, 128))
    if code:
        return None
    commit, tree, epoch = out.decode().split()
    return Release(repo, commit, tree, int(epoch))


def commit_tree(
    repo: Path,
    tree: str,
    parents: Sequence[str],
    message: str | bytes,
    *,
    author: tuple[str, str] = _MAKER,
    dates: tuple[int | str, int | str],
) -> str:
    """A commit whose id depends on the arguments only; `dates` are the author's and the committer's."""
    stamps = [f"{when} +0000" if isinstance(when, int) else when for when in dates]
    env = {
        "GIT_AUTHOR_NAME": author[0],
        "GIT_AUTHOR_EMAIL": author[1],
        "GIT_AUTHOR_DATE": stamps[0],
        "GIT_COMMITTER_NAME": _MAKER[0],
        "GIT_COMMITTER_EMAIL": _MAKER[1],
        "GIT_COMMITTER_DATE": stamps[1],
    }
    body = message.encode() if isinstance(message, str) else message
    options = [part for parent in parents for part in ("-p", parent)]
    return git(["commit-tree", *options, tree], repo, stdin=body, env=env)


class Index:
    """A temporary index of `repo`, holding `tree` at first."""

    def __init__(self, repo: Path, file: Path, tree: str):
        self.repo, self._file = repo, file
        self._env = {"GIT_INDEX_FILE": str(file), "GIT_DIR": str(repo)}
        self._base = tree
        self.run(["read-tree", tree])

    def run(self, args: Sequence[str], *, stdin: bytes | None = None) -> str:
        return git(args, self.repo, stdin=stdin, env=self._env)

    def apply(self, patches: Sequence[Path]) -> list[str]:
        """Apply patch files in order; returns what git said on success, offsets among it.

        Raises ApplyFailed for the first that does not; the index is then unchanged from before it.
        """
        if not patches:
            return []
        try:
            return self._apply(patches)
        except GitFailed as failed:
            if len(patches) == 1:
                raise _explained(patches[0], failed) from None
        said = []
        for patch in patches:
            said += self.apply([patch])
        return said

    def _apply(self, patches: Sequence[Path]) -> list[str]:
        names = [str(path.resolve()) for path in patches]
        _, _, stderr = git_bytes(["apply", "--cached", "--verbose", *names], self.repo, env=self._env)
        return stderr.splitlines()

    def reverse_applies(self, patch: Path) -> bool:
        """Whether the index holds what `patch` adds and lacks what it removes."""
        args = ["apply", "--cached", "--check", "--reverse", str(patch.resolve())]
        return not git_bytes(args, self.repo, env=self._env, ok=(0, 1))[0]

    def unmerged(self) -> dict[str, dict[int, str]]:
        """file -> stage -> blob id of what a three-way merge left in conflict."""
        found: dict[str, dict[int, str]] = {}
        for entry in filter(None, self.run(["ls-files", "--unmerged", "-z"]).split("\0")):
            meta, _, file = entry.partition("\t")
            _mode, blob, stage = meta.split()
            found.setdefault(file, {})[int(stage)] = blob
        return found

    def blobs(self, files: Sequence[str]) -> dict[str, tuple[str, str]]:
        """file -> (mode, blob id) for those of `files` that are in the index."""
        out = self.run(["--literal-pathspecs", "ls-files", "--stage", "-z", "--", *files]) if files else ""
        return dict(_stage_entries(out))

    def carry_over(self, mirrors: Mapping[str, str]) -> list[str]:
        """Repeat in each mirror what changed in its original since the last call; returns the files changed.

        Raises UserError where a mirror's file was not a copy of the original's.
        """
        if not mirrors:
            return []
        originals = sorted(set(mirrors.values()))
        changed = self.run(["diff-index", "--cached", "-z", "--no-renames", self._base, "--", *originals])
        lines, files = [], []
        for old_blob, mode, new_blob, file in _raw_entries(changed):
            for mirror, original in mirrors.items():
                if not file.startswith(original + "/"):
                    continue
                twin = mirror + file[len(original) :]
                before = self.blobs([twin]).get(twin)
                if before and before[1] not in (old_blob, new_blob):
                    raise UserError(
                        f"{twin} is no copy of {file} in this release; patch it by name and "
                        f"take {mirror} out of [mirrors]"
                    )
                if not before and old_blob.strip("0"):
                    continue  # the sdist ships this file once
                lines.append(f"{mode} {new_blob}\t{twin}")
                files.append(twin)
        if lines:
            self.run(["update-index", "--index-info"], stdin=("\n".join(lines) + "\n").encode())
        if changed:
            self._base = self.write_tree()
        return files

    def write_tree(self) -> str:
        return self.run(["write-tree"])

    def save(self) -> bytes:
        """What the index holds, for `restore`: a tenth of the cost of reading a tree again."""
        return self._file.read_bytes()

    def restore(self, saved: bytes) -> None:
        self._file.write_bytes(saved)


@contextmanager
def temporary_index(release: Release) -> Iterator[Index]:
    """An index that holds the pristine release and is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="carry-index-") as scratch:
        yield Index(release.repo, Path(scratch) / "index", release.tree)


def lay(release: Release, tree: str, folder: Path) -> None:
    """Write `tree`'s files to `folder`, which must not exist, byte for byte."""
    folder.mkdir(parents=True)
    try:
        with tempfile.TemporaryDirectory(prefix="carry-index-") as scratch:
            index = Index(release.repo, Path(scratch) / "index", tree)
            index.run([f"--work-tree={folder.resolve()}", "checkout-index", "--all", "--quiet"])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def changed_files(release: Release, old: str, new: str) -> list[str]:
    """Files that differ between two trees."""
    out = git(["diff-tree", "-r", "-z", "--no-renames", "--name-only", old, new], release.repo)
    return [name for name in out.split("\0") if name]


def _stage_entries(out: str) -> Iterator[tuple[str, tuple[str, str]]]:
    for entry in filter(None, out.split("\0")):
        meta, _, file = entry.partition("\t")
        mode, blob, _stage = meta.split()
        yield file, (mode, blob)


def _raw_entries(out: str) -> Iterator[tuple[str, str, str, str]]:
    parts = [part for part in out.split("\0") if part]
    for meta, file in zip(parts[::2], parts[1::2], strict=True):
        _old_mode, mode, old_blob, new_blob, _status = meta.lstrip(":").split()
        yield old_blob, mode, new_blob, file


def _explained(patch: Path, failed: GitFailed) -> ApplyFailed:
    said = [line.removeprefix("error: ") for line in failed.stderr.splitlines() if line.startswith("error: ")]
    for line in said:
        hit = re.fullmatch(r"patch failed: (.*):(\d+)", line)
        if hit:
            return ApplyFailed(patch, hit[1], int(hit[2]), "the lines it expects are not there")
    hit = re.fullmatch(r"(.*): (.*)", said[0]) if said else None
    if hit:
        return ApplyFailed(patch, hit[1], 0, hit[2])
    return ApplyFailed(patch, "the release", 0, said[0] if said else failed.stderr.strip())
