"""What a CPU-only machine lacks for DeepSpeed to run: bridges, per release, and nothing else.

None of this touches saving or loading.  On a machine with CUDA nothing here is applied.

* 0.12.6 picks its CPU accelerator only where Intel's extension imports, and imports oneCCL's binding.
* The CPU accelerators name a ``ccl`` backend, or build an shm reduce op; both become plain gloo.
* fp16 is reported as unsupported on most CPUs; torch computes it all the same.
* <= 0.12 finds gradients by ``Tensor.type()`` names that no CPU tensor has.
* Collectives that are waited for by the last of them, as CUDA's streams allow and gloo's independent handles do not.
* 0.13 to 0.18 make a tensor of a number with ``FloatTensor``, which CUDA's accelerator takes for a value.
* Up to 0.18, gathers go into views with autograd on, which gloo's kernels refuse.
* FusedAdam's kernel is CUDA's: ``resume.standin.fused_adam`` takes its place.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import logging
import os
import sys
import types

import torch

from resume.standin.cuda_calls import Stream


def _stub(name: str, **attributes) -> None:
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        sys.modules[name] = module


def _version() -> tuple[int, int]:
    major, minor = importlib.metadata.version("deepspeed").split(".")[:2]
    return int(major), int(minor)


def _before_import() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    _stub("intel_extension_for_pytorch", __version__="0.0.stub")
    if _version() <= (0, 13):
        _stub("oneccl_bindings_for_pytorch")
    import torch.distributed.elastic.agent.server.api as agent

    for name, value in (("log", logging.getLogger("elastic")), ("_get_socket_with_port", lambda: None)):
        if not hasattr(agent, name):
            setattr(agent, name, value)


def _accelerator():
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    cls = type(accelerator)
    accelerator._communication_backend_name = "gloo"
    cls.is_fp16_supported = lambda self: True
    cls.is_bf16_supported = lambda self: True
    cls.supported_dtypes = lambda self: [torch.float32, torch.bfloat16, torch.float16]
    if accelerator.Stream is None:
        cls.Stream = property(lambda self: Stream)
        cls.Event = property(lambda self: Stream)
        cls.current_stream = cls.default_stream = lambda self, device_index=None: Stream()
        cls.stream = lambda self, stream: contextlib.nullcontext()
    if (0, 13) <= _version() <= (0, 18):
        cls.FloatTensor = property(lambda self: functools.partial(torch.tensor, dtype=torch.float))
    return accelerator


def _split_by_dtype(tensors):
    """``split_half_float_double_sparse`` of <= 0.12 with dtypes in place of CUDA's type names."""
    buckets = []
    for dtype in (torch.float16, torch.float32, torch.float64, torch.bfloat16):
        bucket = [t for t in tensors if t.dtype == dtype and t.layout == torch.strided]
        if bucket:
            buckets.append((dtype, bucket))
    return buckets


def _without_autograd(collective):
    """The same collective on the same memory, with no autograd history for gloo's kernels to refuse.

    It is over when it returns: old releases wait for the last of several only.
    """

    def plain(value):
        if torch.is_tensor(value):
            return value.data
        return [plain(v) for v in value] if isinstance(value, list) else value

    @functools.wraps(collective)
    def call(self, *args, **kwargs):
        work = collective(self, *map(plain, args), **{k: plain(v) for k, v in kwargs.items()})
        if hasattr(work, "wait"):
            work.wait()
        return work

    return call


def _after_import() -> None:
    import deepspeed.runtime.engine as engine

    comm_torch = sys.modules["deepspeed.comm.torch"]  # the attribute of that name is torch itself

    if hasattr(comm_torch, "build_shm_op"):
        comm_torch.build_shm_op = lambda: None
    for name in ("all_gather_into_tensor", "all_gather", "broadcast", "all_reduce", "reduce_scatter_tensor"):
        setattr(comm_torch.TorchBackend, name, _without_autograd(getattr(comm_torch.TorchBackend, name)))
    if _version() <= (0, 12):
        engine.split_half_float_double_sparse = _split_by_dtype

    import deepspeed.ops.adam.fused_adam as fused

    from resume.standin import fused_adam as standin

    class Builder:
        def load(self, *_args, **_kwargs):
            return types.SimpleNamespace(multi_tensor_adam=standin.multi_tensor_adam)

    fused.FusedAdamBuilder = Builder
    fused.multi_tensor_applier = standin.Applier()


@functools.cache
def prepare() -> None:
    """Import DeepSpeed with its bridges, and torch's compiler, which the first optimizer and its step would import."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        import deepspeed
    else:
        _before_import()
        import deepspeed  # noqa: F401

        _accelerator()
        _after_import()
    importlib.import_module("torch._dynamo")
    with contextlib.suppress(ModuleNotFoundError):  # Muon's functions are compiled ones, and every release looks at it
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage ten times an engine, each time over every module it imported


def setup(rank: int, world: int) -> None:
    """Bring one rank up and join the process group."""
    prepare()
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)


_LINEAR = torch.nn.functional.linear
_TABLES = (
    "_EXPERT_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP_RANKS",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
)


def reset() -> None:
    """Forget what one engine leaves in DeepSpeed's module globals, before the next is built."""
    from deepspeed.utils import groups

    for name in _TABLES:
        getattr(groups, name, {}).clear()
    groups.mpu = None
    torch.set_grad_enabled(True)
    torch.nn.functional.linear = _LINEAR  # ZeRO-3 leaves its own, which rounds otherwise
