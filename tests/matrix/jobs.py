"""What the ranks run for the matrix: train and save once per setup, convert, and one load per cell.

Every function is called on all ranks. What a training left behind lies in its folder, so that fresh processes,
and processes at another world size, find it: the checkpoint below ``saved/``, and every rank's view in ``rank<N>.pt``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import io
import os
import time
from dataclasses import replace

import torch
from resume import oracle
from resume.deepspeed import engines
from resume.oracle import Snapshot

from matrix import expected, training
from matrix.cells import Cell, Setup
from matrix.modes import Mode

MORE = 3  # steps after the load
SEED = {"saving": 1, "loading": 2, "reference": 3}


def _rank() -> int:
    import deepspeed.comm as dist

    return dist.get_rank()


def agree(flag: bool) -> bool:
    """Whether ``flag`` is true on every rank."""
    import deepspeed.comm as dist

    tensor = torch.tensor([int(flag)])
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return bool(tensor.item())


@contextlib.contextmanager
def _quiet():
    """Upstream's prints and progress bars go nowhere."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def warm() -> None:
    """Build and train a first engine: it imports for seconds, which must not count as a hang."""
    setup = Setup("bf16", 3, "dense", "adamw", 1)
    training.train(training.build(setup, 0), setup, 0, 1)
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage several times an engine


def _client_state(setup: Setup) -> dict:
    """What a client saves: its own, and what upstream's conversion to a universal checkpoint asks it for.

    The save of a model with experts refuses that key, since it writes it itself.
    """
    from deepspeed.checkpoint import constants

    if setup.model == "moe":
        return dict(engines.CLIENT)
    info = {constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    return {**engines.CLIENT, constants.UNIVERSAL_CHECKPOINT_INFO: info}


def train(setup: Setup, mode: Mode, folder: str) -> float:
    """Train, save below ``folder``, train on; how far the latter steps moved any weight."""
    engine = training.build(setup, SEED["saving"])
    training.train(engine, setup, 0, mode.steps)
    saved = os.path.join(folder, "saved")
    tag = mode.tag
    with _quiet():
        engine.save_checkpoint(saved, tag=tag, client_state=_client_state(setup), **mode.save)
    view = training.snapshot(engine, engines.CLIENT)
    views = {"saved": view, "saved by name": training.by_name(engine, view)}
    if mode.how == "save16":
        with _quiet():
            engine.save_16bit_model(folder)
    training.train(engine, setup, mode.steps, MORE)
    view = training.snapshot(engine, engines.CLIENT)
    views.update({"final": view, "final by name": training.by_name(engine, view)})
    if "later:newer" in mode.damage:  # a newer tag, which `latest` then names
        with _quiet():
            engine.save_checkpoint(saved, tag="newer", client_state={"epoch": 99})
    torch.save(views, os.path.join(folder, f"rank{_rank()}.pt"))
    return oracle.moved([views["saved"]], [view])


def convert(folder: str, tag: str, out: str) -> None:
    """Make a universal checkpoint of ``folder``/``tag`` in ``out``, on the first rank."""
    from deepspeed.checkpoint import ds_to_universal

    if _rank():
        return
    arguments = argparse.Namespace(
        input_folder=os.path.join(folder, tag), output_folder=os.path.join(out, "universal"), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
    )  # fmt: skip
    with _quiet():
        ds_to_universal.main(arguments)
    with open(os.path.join(out, "latest_universal"), "w") as file:
        file.write("universal")


@functools.lru_cache(maxsize=4)
def _views(folder: str, rank: int) -> dict[str, Snapshot]:
    return torch.load(os.path.join(folder, f"rank{rank}.pt"), weights_only=False)


_before: dict[tuple[Setup, bool], Snapshot] = {}
_references: dict[tuple, Snapshot] = {}


def load(cell: Cell, folder: str, saved: str) -> dict:
    """Load ``saved`` as the cell says, hold it against what ``expected`` says, train on.

    ``folder``: of the training. Returns the first differences and how many there are, the phase that they were seen
    in, whether load_checkpoint returned a path, and the seconds of processor that it all took.
    """
    started = time.process_time()
    return {**_load_and_compare(cell, folder, saved), "cpu_s": time.process_time() - started}


def _load_and_compare(cell: Cell, folder: str, saved: str) -> dict:
    mode, setup = cell.how, cell.loaded_by
    views = _views(folder, _rank() if cell.worlds[0] == cell.worlds[1] else 0)
    if mode.how == "to32":
        return _exported(views, saved, cell)
    if mode.how == "save16":
        return _saved16(views, folder)
    named = not cell.same_layout
    engine, before = _fresh(setup, mode.trained, named)
    path, client = _load(engine, saved, mode)
    raw = training.snapshot(engine, client)
    loaded = training.by_name(engine, raw) if named else raw
    if path is None:
        return _report("load", oracle.differences(before, replace(loaded, client={})), path)
    state = expected.State(cell, saved=views["saved by name" if named else "saved"], before=before, loaded=loaded)
    found, own_masters = expected.after_load(state)
    if mode.how == "resave" and agree(not found):
        return _resaved(engine, setup, saved, loaded, named)
    if not agree(not found):
        return _report("load", found, path)
    if mode.optimizer and expected.same_run(cell):
        want = views["final by name" if named else "final"]
    elif expected.has_reference(cell):
        want = _reference(cell, raw, views, agree(own_masters))
    else:
        return _report("load", [], path)
    training.train(engine, setup, mode.steps, MORE)
    final = _view(engine, client, named)
    found, exact = expected.further(want, final, cell)
    return {**_report("training on", found, path), "exact": exact}


def _fresh(setup: Setup, trained: int, named: bool = False):
    engine = training.build(setup, SEED["loading"])
    if trained:
        training.train(engine, setup, 100, trained)
        return engine, _view(engine, None, named)
    if (setup, named) not in _before:
        _before[setup, named] = _view(engine, None, named)
    return engine, _before[setup, named]


def _view(engine, client, named: bool = False) -> Snapshot:
    view = training.snapshot(engine, client)
    return training.by_name(engine, view) if named else view


def _load(engine, saved: str, mode: Mode):
    arguments = dict(mode.arguments)
    if arguments.get("custom_load_fn"):
        arguments["custom_load_fn"] = _custom
    with _quiet():
        return engine.load_checkpoint(saved, **arguments)


def _custom(src, dst):
    """A user's own load function: the state dict into the module."""
    dst.load_state_dict(src)


def _reference(cell: Cell, raw: Snapshot, views: dict, own_masters: bool) -> Snapshot:
    """A new run from the loaded weights (and masters, where the load took better ones) with a fresh optimizer."""
    setup, mode = cell.loaded_by, cell.how
    scheduler = mode.scheduler and bool(views["saved"].scheduler)
    print_of = sum(t.double().sum().item() for t in raw.weights.values())  # rounded weights or better ones
    key = (setup, cell.saved_by, own_masters, mode.steps, scheduler, print_of)
    if key not in _references:
        engine = training.build(setup, SEED["reference"], {**raw.weights, **raw.buffers})
        expected.start_from(engine, raw, own_masters)
        if scheduler:
            engine.lr_scheduler.load_state_dict(views["saved"].scheduler)
            basic = getattr(engine.optimizer, "optimizer", engine.optimizer)
            for i, group in enumerate(basic.param_groups):
                group["lr"] = views["saved"].groups[f"[{i}].lr"]
        training.train(engine, setup, mode.steps, MORE)
        _references[key] = _view(engine, None, not cell.same_layout)
    return _references[key]


def _resaved(engine, setup: Setup, saved: str, first: Snapshot, named: bool) -> dict:
    """Save what was loaded at once, and load it again in full: nothing may change on the way."""
    again = f"{saved}-again"
    with _quiet():
        engine.save_checkpoint(again, tag="again", client_state=dict(engines.CLIENT))
        second, _ = _fresh(setup, 0)
        _, client = second.load_checkpoint(again, tag="again")
    return _report("load again", oracle.differences(first, _view(second, client, named)), again)


def _exported(views: dict, saved: str, cell: Cell) -> dict:
    """The export against what this rank had: fp32 masters, and frozen weights in the dtype that they were saved in."""
    from deepspeed.utils import zero_to_fp32

    with _quiet():
        found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(saved, **cell.how.load)
    view = views["saved"]
    want = {n: t.float() for n, t in {**view.weights, **view.masters}.items()}
    own = f".deepspeed_experts.{_rank()}." if cell.model == "moe" else ""  # each rank calls its expert the first one
    want = {n.replace(".deepspeed_experts.0.", own) if own else n: t for n, t in want.items()}
    found = {n: t.float() if n in view.weights and n not in view.masters else t for n, t in found.items()}
    if cell.saved_by.world > 1 and cell.model in ("moe", "pipe2"):  # the others' layers are for them to compare
        found = {n: t for n, t in found.items() if n in want or n in view.buffers}
    return _report("export", expected.exported(want, view.buffers, found, torch.float32), saved)


def _saved16(views: dict, folder: str) -> dict:
    found = torch.load(os.path.join(folder, "pytorch_model.bin"), weights_only=False)
    return _report("export", expected.exported(views["saved"].weights, views["saved"].buffers, found), folder)


def _report(phase: str, found: list, path) -> dict:
    return {
        "phase": phase,
        "path": path is not None,
        "count": len(found),
        "exact": not found,
        "found": [{"kind": d.kind, "name": d.name, "text": d.text, "by": d.by} for d in found[:3]],
    }
