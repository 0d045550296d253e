"""Stand-ins for device, stream and NCCL calls: a view of ``torch`` for one module, in which "cuda" is the CPU.

A module keeps its code and gets ``torch`` replaced by a ``Torch()``; nothing
outside that module sees it.  Used only where the machine has no CUDA.
"""

from __future__ import annotations

import contextlib

import torch


class Stream:
    """A stream that is always in step."""

    def __init__(self, *_args, **_kwargs):
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _other) -> None:
        pass

    def record_event(self, *_args) -> None:
        pass

    def wait_event(self, *_args) -> None:
        pass


class Cuda:
    """``torch.cuda`` where the CPU is the one device."""

    Stream = Event = Stream
    IntTensor = torch.IntTensor

    def __getattr__(self, name):
        return getattr(torch.cuda, name)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def current_stream(self, *_args) -> Stream:
        return Stream()

    def stream(self, _stream):
        return contextlib.nullcontext()

    def synchronize(self, *_args) -> None:
        pass


class Torch:
    """``torch`` with ``Cuda`` for its ``cuda``, and the CPU wherever a device is called "cuda"."""

    cuda = Cuda()

    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, device="cpu", _index=None):
        return torch.device("cpu" if str(device).startswith("cuda") else device)

    def histc(self, values, *args, **kwargs):
        """CUDA counts integers too; the result has their dtype."""
        return torch.histc(values.float(), *args, **kwargs).to(values.dtype)

    def zeros(self, *args, device=None, **kwargs):
        return torch.zeros(*args, device=self.device(device or "cpu"), **kwargs)


def everywhere() -> None:
    """The calls that megatron-core makes from many modules, for the whole process: the current device is the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_args: None
    torch.cuda.current_stream = lambda *_args: Stream()


class Coalescing:
    """``_coalescing_manager`` for collectives that are over when they return."""

    def __init__(self, *_args, **_kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_error) -> None:
        pass

    def wait(self) -> None:
        pass


def reduce_scatter_tensor(output, source, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False) -> None:
    """Sum or average ``source`` over ``group``; this rank's part goes to ``output``. gloo has neither."""
    total = source.clone()
    torch.distributed.all_reduce(total, group=group)
    part = total.chunk(torch.distributed.get_world_size(group))[torch.distributed.get_rank(group)]
    average = op == torch.distributed.ReduceOp.AVG
    output.copy_(part / torch.distributed.get_world_size(group) if average else part)


def all_gather_into_tensor(output, source, group=None, async_op=False) -> None:
    """The whole of every rank's ``source``; over when it returns."""
    parts = [torch.empty_like(source) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(parts, source.contiguous(), group=group)
    output.copy_(torch.cat(parts))


@contextlib.contextmanager
def cuda_type_names():
    """``Tensor.type()`` names CPU tensors as their CUDA twins, for code that tells dtypes apart by those names."""
    original = torch.Tensor.type

    def named(self, *args, **kwargs):
        name = original(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) and not self.is_cuda else name

    torch.Tensor.type = named
    try:
        yield
    finally:
        torch.Tensor.type = original
