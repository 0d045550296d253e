"""CPUAdam, compiled once and before any rank is up: it takes minutes, which no rank should wait for.

``python -m matrix.ops`` compiles it, in the environment of the ranks; ``use`` gives it to DeepSpeed. What was compiled
is kept by its inputs: DeepSpeed's own way is by the folder that it is installed in, and every wheel has another.
A lock that an interrupted compilation left is removed: torch would wait for it for ever, and whoever calls this is the
only one to use the folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

_NAME = "cpu_adam"


def _kept() -> Path:
    """Where the compiled op of this DeepSpeed, torch and Python is, or will be."""
    import deepspeed
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {torch.__config__.show()} {sys.version}".encode())
    ops = Path(deepspeed.__file__).parent / "ops"
    for path in sorted(p for folder in ("csrc", "op_builder") for p in (ops / folder).rglob("*") if p.is_file()):
        if path.suffix != ".pyc":
            digest.update(f"{path.relative_to(ops)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return Path(os.environ["TORCH_EXTENSIONS_DIR"]).parent / "kept" / digest.hexdigest()[:32] / f"{_NAME}.so"


def use() -> None:
    """Put the kept op where DeepSpeed keeps what it has loaded; where none was compiled, do nothing."""
    path = _kept()
    if not path.exists():
        return
    from deepspeed.ops.op_builder.builder import OpBuilder

    spec = importlib.util.spec_from_file_location(_NAME, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    OpBuilder._loaded_ops[_NAME] = module


def main() -> None:
    from resume.deepspeed.compat import prepare

    prepare()
    kept = _kept()
    if kept.exists():
        return
    built = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    for lock in built.glob("**/lock"):
        lock.unlink()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(built / _NAME / kept.name, f"{kept}.part")
    os.replace(f"{kept}.part", kept)
    shutil.rmtree(built)


if __name__ == "__main__":
    main()
