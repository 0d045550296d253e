"""A series as commits, and commits as patch files.

The two undo each other: what `export` writes for the commits that `commits`
makes is byte for byte the series they were made from.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from carry.errors import UserError
from carry.git import git, git_bytes
from carry.patches import Patch, apply_to, check_blobs
from carry.pins import Pin
from carry.trees import Release, commit_tree, temporary_index

# Everything that could vary in a patch file, said once.
_FORMAT = (
    "format-patch",
    "--quiet",
    "--stat=72",
    "--summary",
    "--zero-commit",
    "--full-index",
    "--no-signature",
    "--no-numbered",
    "--start-number=1",
    "--subject-prefix=PATCH",
    "--suffix=.patch",
    "--filename-max-length=64",
    "--no-renames",
    "--unified=3",
    "--inter-hunk-context=0",
    "--diff-algorithm=myers",
    "--no-ext-diff",
    "--no-textconv",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--encode-email-headers",
    "--no-attach",
    "--no-thread",
    "--no-signoff",
    "--no-cover-letter",
    "--no-notes",
    "--no-base",
    "--no-color",
    "--no-from",
)


def commits(base: Release, pin: Pin, series: Sequence[Patch]) -> str:
    """The id of the last of one commit per patch on top of the release, in its bare repository.

    Raises UserError where a patch does not apply, naming file, hunk and line.
    """
    laid = []
    with temporary_index(base) as index:
        for patch in series:
            apply_to(index, [patch])
            check_blobs(index, [patch])
            index.carry_over(pin.upstream.mirrors)
            laid.append((patch, index.write_tree()))
    return commits_of(base, laid)


def commits_of(base: Release, laid: Sequence[tuple[Patch, str]]) -> str:
    """As `commits`, of patches whose trees are there already: each with what the release is once it is on."""
    head = base.commit
    for number, (patch, tree) in enumerate(laid, 1):
        name, email, date, message = _mail(base.repo, patch)
        # The committer's date only has to be the same every time, and later than the parent's.
        dates = (date, base.epoch + number)
        head = commit_tree(base.repo, tree, [head], message, author=(name, email), dates=dates)
    return head


def export(repo: Path, since: str, head: str, pin: Pin, folder: Path) -> list[Path]:
    """Write the commits after `since` up to `head` to `folder` as numbered patch files, without mirrors."""
    mirrors = [f":(exclude,top){mirror}" for mirror in pin.upstream.mirrors]
    git([*_FORMAT, f"--output-directory={folder.resolve()}", f"{since}..{head}", "--", ":/", *mirrors], repo)
    return sorted(folder.glob("*.patch"))


def _mail(repo: Path, patch: Patch) -> tuple[str, str, str, bytes]:
    """Author, email, date and commit message of a patch file, as `git am` reads them."""
    with tempfile.TemporaryDirectory(prefix="carry-mail-") as scratch:
        body = Path(scratch) / "message"
        _, out, _ = git_bytes(
            ["mailinfo", "-b", "--encoding=UTF-8", "--no-scissors", str(body), os.devnull],
            repo,
            stdin=patch.path.read_bytes(),
        )
        message = body.read_bytes()
    head = dict(line.split(": ", 1) for line in out.decode("utf-8", "replace").splitlines() if ": " in line)
    for key in ("Author", "Email", "Date", "Subject"):
        if not head.get(key):
            raise UserError(
                f"{patch.path.name}:1: its mail header names no {key.lower()}; export it with `carry refresh`"
            )
    text = head["Subject"].encode() + b"\n" + (b"\n" + message if message.strip() else b"")
    return head["Author"], head["Email"], head["Date"], text
