"""DeepSpeed's own CPUAdam, compiled once and before a rank needs it: it takes a minute, which no rank should wait for.

``compiled()`` does so in a process of its own; ``use()`` gives what it made to DeepSpeed, in a rank. It is kept by its
inputs: DeepSpeed's own way is by the folder that it is installed in, and every wheel has another. Where several ask at
once, one compiles and the others wait. A lock that an interrupted compilation left is removed: torch would wait for it
for ever.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_NAME = "cpu_adam"


def _folder() -> Path:
    """Where torch compiles."""
    return Path(
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{tempfile.gettempdir()}/carry-extensions/{os.getuid()}")
    )


def _kept() -> Path:
    """Where the compiled op of this DeepSpeed, torch and Python is, or will be."""
    import deepspeed
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {torch.__config__.show()} {sys.version}".encode())
    ops = Path(deepspeed.__file__).parent / "ops"
    for path in sorted(p for folder in ("csrc", "op_builder") for p in (ops / folder).rglob("*") if p.is_file()):
        if path.suffix != ".pyc":
            digest.update(f"{path.relative_to(ops)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return _folder().parent / "kept" / digest.hexdigest()[:32] / f"{_NAME}.so"


def use() -> None:
    """Put the kept op where DeepSpeed keeps what it has loaded; where none was compiled, do nothing."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    path = _kept()
    if _NAME in OpBuilder._loaded_ops or not path.exists():
        return

    spec = importlib.util.spec_from_file_location(_NAME, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    OpBuilder._loaded_ops[_NAME] = module


def compiled() -> None:
    """Compile it, unless that has been done. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-W", "ignore", "-m", __name__], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    from resume.deepspeed.compat import prepare

    prepare()
    kept, built = _kept(), _folder()
    kept.parent.mkdir(parents=True, exist_ok=True)
    with open(kept.parent.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists():
            return
        for left in built.glob("**/lock"):
            left.unlink()
        from deepspeed.ops.op_builder import CPUAdamBuilder

        CPUAdamBuilder().load()
        shutil.copy(built / _NAME / kept.name, f"{kept}.part")
        os.replace(f"{kept}.part", kept)
        shutil.rmtree(built)


if __name__ == "__main__":
    main()
