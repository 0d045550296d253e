"""Run a function on N ranks and bring results and errors home.

Protocol
1. ``Ranks(world, setup)`` starts N processes; each sets the launcher's
   variables and calls ``setup`` ("module:function") once.
2. ``run(target, **kwargs)`` calls "module:function" on every rank and returns
   the list of results, rank order.
3. A rank that raises sends a ``Symptom``; anything else becomes a ``Crash``.
   When one rank fails and another does not come back within ``grace``
   seconds, that is ``PeersHung``; when nobody fails and one does not come
   back within ``timeout``, that is ``Hang``.  After a hang or a death the
   processes are killed and the next run starts fresh ones.
Many runs share the processes, since importing a framework costs seconds.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import sysconfig
import time
import traceback
from multiprocessing.connection import wait

from resume.symptoms import Crash, Hang, PeersHung, Symptom

_STDLIB = sysconfig.get_paths()["stdlib"]


def _resolve(target: str):
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _folder(package: str) -> str | None:
    spec = importlib.util.find_spec(package)  # a namespace, such as megatron, has folders and no file
    places = list(spec.submodule_search_locations or ()) if spec else []
    return places[0] + os.sep if places else None


def _is_upstream(frames, packages) -> bool:
    """Whether the innermost frame that is neither torch's nor the standard library's lies in one of ``packages``.

    ``typing_extensions`` wraps functions of torch's and counts as torch.
    """
    ours = tuple(filter(None, map(_folder, packages)))
    torch = _folder("torch") or "<"
    for file, _, _ in reversed(frames):
        library = file.startswith(_STDLIB) and f"{os.sep}site-packages{os.sep}" not in file
        if library or file.startswith((torch, "<")) or os.path.basename(file) == "typing_extensions.py":
            continue
        return file.startswith(ours)
    return False


def as_crash(error: BaseException, rank: int, packages=("deepspeed", "nemo", "megatron", "apex")) -> Crash:
    """Turn any exception into a ``Crash`` that can be pickled."""
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    mro = [cls.__name__ for cls in type(error).__mro__]
    return Crash(type(error).__name__, str(error), mro, frames, _is_upstream(frames, packages), rank)


def _send(conn, what) -> None:
    # plain pickle: multiprocessing's own would pass tensors as shared-memory descriptors and run out of them
    conn.send_bytes(pickle.dumps(what))


def _receive(conn):
    return pickle.loads(conn.recv_bytes())


def _serve(conn, rank: int, world: int, port: int, setup: str, path: list[str]) -> None:
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        _resolve(setup)(rank, world)
        _send(conn, ("ready", None))
    except BaseException as error:
        _send(conn, ("error", as_crash(error, rank)))
        return
    while True:
        try:
            job = _receive(conn)
        except EOFError:
            return
        try:
            target, kwargs = job
            reply = ("ok", _resolve(target)(**kwargs))
        except Symptom as error:
            error.remote = traceback.format_exc()
            reply = ("error", error)
        except BaseException as error:
            reply = ("error", as_crash(error, rank))
        try:
            _send(conn, reply)
        except Exception as error:
            _send(conn, ("error", as_crash(error, rank)))


class Ranks:
    """N processes that run functions together.

    ``world``: number of ranks.  ``setup``: "module:function" called with (rank, world) in each.
    ``preload``: a module imported once, in the process that ranks are forked from; not with CUDA, which a fork breaks.
    """

    def __init__(self, world: int, setup: str, preload: str | None = None):
        self.world, self.setup, self.preload = world, setup, preload
        self._procs: list = []
        self._conns: list = []

    def start(self, timeout: float = 180.0) -> None:
        """Start the processes. A port that another program took meanwhile is tried anew, twice."""
        for last in (False, False, True):
            try:
                return self._start(timeout)
            except Symptom as error:
                if last or "address already in use" not in str(error).lower():
                    raise

    def _start(self, timeout: float) -> None:
        context = multiprocessing.get_context("forkserver" if self.preload else "spawn")
        if self.preload:
            context.set_forkserver_preload([self.preload])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            proc = context.Process(
                target=_serve, daemon=True, args=(theirs, rank, self.world, port, self.setup, list(sys.path))
            )
            proc.start()
            theirs.close()
            self._procs.append(proc)
            self._conns.append(ours)
        try:
            self._collect(timeout, 10.0)
        except Exception:
            self.stop()  # a rank whose set-up failed has ended
            raise

    def run(self, target: str, *, timeout: float = 120.0, grace: float = 60.0, **kwargs) -> list:
        """Call ``target`` ("module:function") with ``kwargs`` on every rank; results in rank order.

        Raises the first rank's ``Symptom``, ``Crash``, ``PeersHung`` or ``Hang``.
        """
        self._start_job(target, kwargs)
        return self._collect(timeout, grace)

    def outcomes(self, target: str, *, timeout: float = 120.0, grace: float = 60.0, **kwargs) -> list:
        """As ``run``, but each rank's result or exception in rank order: how *every* rank ended."""
        self._start_job(target, kwargs)
        return self._gather(timeout, grace)

    def _start_job(self, target: str, kwargs: dict) -> None:
        if not self._procs:
            self.start()
        try:
            for conn in self._conns:
                _send(conn, (target, kwargs))
        except OSError:
            self.stop()
            self.start()
            for conn in self._conns:
                _send(conn, (target, kwargs))

    def _gather(self, timeout: float, grace: float) -> list:
        results: dict[int, object] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.world:
            waiting = [c for r, c in enumerate(self._conns) if r not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for conn in ready:
                rank = self._conns.index(conn)
                try:
                    kind, value = _receive(conn)
                except (EOFError, OSError):
                    self._procs[rank].join(5)
                    code = self._procs[rank].exitcode
                    kind, value = "error", Crash("ProcessDied", f"exit code {code}", rank=rank)
                results[rank] = value
                if kind == "error":
                    deadline = min(deadline, time.monotonic() + grace)
        failed = [v for v in results.values() if isinstance(v, BaseException)]
        for rank in range(self.world):
            if rank not in results:
                reason = f"while another failed with {failed[0]}" if failed else f"within {timeout:.0f} s"
                results[rank] = (PeersHung if failed else Hang)(f"rank {rank} did not come back {reason}")
        ended = [results[rank] for rank in range(self.world)]
        if not self._reusable(ended):
            self.stop()
        return ended

    @staticmethod
    def _reusable(ended: list) -> bool:
        """Whether the ranks are in step: all came back, or all failed alike; others may be at different collectives."""
        errors = [v for v in ended if isinstance(v, BaseException)]
        if any(isinstance(e, (PeersHung, Hang)) or getattr(e, "type_name", "") == "ProcessDied" for e in errors):
            return False
        places = {(type(e), getattr(e, "type_name", ""), getattr(e, "frames", ())[-1:]) for e in errors}
        return not errors or (len(errors) == len(ended) and len(places) == 1)

    def _collect(self, timeout: float, grace: float) -> list:
        results = self._gather(timeout, grace)
        errors = [v for v in results if isinstance(v, BaseException)]
        if not errors:
            return results
        hung = [e for e in errors if isinstance(e, (PeersHung, Hang))]
        raise (hung or errors)[0]

    def stop(self) -> None:
        """End the processes, by force when they do not go by themselves."""
        for conn in self._conns:
            conn.close()
        for proc in self._procs:
            proc.join(0.2)
            if proc.is_alive():
                proc.kill()
                proc.join()
        self._procs, self._conns = [], []
