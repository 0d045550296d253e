"""Runs that tests share: the same cell trained from the same seed gives the same result, so it is run once.

What is kept lies on disk, for the workers of a session to share; ``conftest`` says where.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

ROOT: Path | None = None


def once(what: str, run: Callable[[str], list], folder: str | None = None) -> list:
    """What ``run`` returns, now or in an earlier call for the same ``what``; ``folder`` gets the files that it wrote.

    ``run`` is called with the folder to write to. Nothing is kept when it raises.
    """
    place = ROOT / hashlib.sha256(what.encode()).hexdigest()
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=ROOT) as scratch:
            new = Path(scratch) / "new"
            (new / "files").mkdir(parents=True)
            result = run(str(new / "files"))
            (new / "result").write_bytes(pickle.dumps(result))
            with contextlib.suppress(OSError):  # another worker was first
                os.rename(new, place)
    if folder is not None:
        shutil.copytree(place / "files", folder, dirs_exist_ok=True)
    return pickle.loads((place / "result").read_bytes())


def fingerprint(tensors: Iterable[dict[str, torch.Tensor]]) -> str:
    """A hash of tensors by name, one dict a rank: names, dtypes, shapes and every bit."""
    digest = hashlib.sha256()
    for rank, named in enumerate(tensors):
        for name, tensor in named.items():
            digest.update(f"{rank} {name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
