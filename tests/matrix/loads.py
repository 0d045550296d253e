"""What loads cost: seconds, bytes read and memory of a rank, of a model large enough to tell.

``python -m matrix.loads save FOLDER`` trains and saves on two ranks; ``python -m matrix.loads load FOLDER`` loads what
any wheel saved there, and prints a JSON line per load. One process a wheel and round, so that wheels take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path

WORLD = 2
WIDTH, LAYERS = 1024, 8  # 8.4 million parameters: fp32 masters and two moments are 100 MB
# name -> (stage, arguments of load_checkpoint; None: zero_to_fp32)
LOADS: dict[str, tuple[int, dict | None]] = {
    "full-z0": (0, {}),
    "full-z1": (1, {}),
    "full-z2": (2, {}),
    "full-z3": (3, {}),
    "noopt-z2": (2, {"load_optimizer_states": False}),
    "export-z2": (2, None),
    "export-z3": (3, None),
}


def _engine(stage: int):
    import deepspeed
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _step(engine) -> None:
    import torch

    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().mean())
    engine.step()


def save(folder: str) -> None:
    """Train a step at each stage and save it; on every rank."""
    for stage in range(4):
        engine = _engine(stage)
        _step(engine)
        engine.save_checkpoint(str(Path(folder) / f"z{stage}"), tag="t")


def load(folder: str, name: str) -> dict[str, float]:
    """One load into a new engine: seconds of clock and of processor, bytes read, peak of resident memory above what it
    was before, of this rank."""
    stage, arguments = LOADS[name]
    saved = str(Path(folder) / f"z{stage}")
    if arguments is None:
        from deepspeed.utils import zero_to_fp32

        def action():
            with contextlib.redirect_stdout(None):
                return zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(saved, tag="t")
    else:
        engine = _engine(stage)

        def action():
            return engine.load_checkpoint(saved, tag="t", **arguments)

    return _measured(action)


def _measured(action) -> dict[str, float]:
    import deepspeed.comm as dist

    dist.barrier()
    before, read, started = _resident("VmRSS"), _bytes_read(), time.monotonic()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    kept = action()
    after = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "wall_s": time.monotonic() - started,
        "cpu_s": after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime,
        "bytes_read": _bytes_read() - read,
        "peak_bytes": max(0, _resident("VmHWM") - before),
    }
    del kept
    return found


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar: from the page cache too


def main() -> int:
    parser = argparse.ArgumentParser(prog="matrix.loads", description=__doc__)
    parser.add_argument("what", choices=("save", "load"))
    parser.add_argument("folder")
    args = parser.parse_args()
    from resume.ranks import Ranks

    pool = Ranks(WORLD, "resume.deepspeed.compat:setup", "matrix.preload")
    pool.start()
    try:
        if args.what == "save":
            pool.run("matrix.loads:save", folder=args.folder, timeout=300)
            return 0
        for name in LOADS:
            ranks = pool.run("matrix.loads:load", folder=args.folder, name=name, timeout=120)
            print(
                "LOAD " + json.dumps({"load": name, **{key: max(r[key] for r in ranks) for key in ranks[0]}}),
                flush=True,
            )
    finally:
        pool.stop()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
