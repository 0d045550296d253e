"""Compile, once and before any rank is up, the ops that cells need: it takes minutes, which no rank should wait for.

``python -m matrix.ops``, in the environment of the ranks. A lock that an interrupted compilation left is removed:
torch would wait for it for ever, and whoever calls this is the only one to use the folder.
"""

from __future__ import annotations

import os
from pathlib import Path


def main() -> None:
    for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("**/lock"):
        lock.unlink()
    from resume.deepspeed.compat import prepare

    prepare()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()


if __name__ == "__main__":
    main()
