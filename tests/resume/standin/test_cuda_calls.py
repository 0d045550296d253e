"""The stand-ins for CUDA and NCCL calls against torch, in fp32 to 1e-6."""

from __future__ import annotations

import pytest
import torch

from resume.ranks import Ranks
from resume.standin import cuda_calls

OP = torch.distributed.ReduceOp


def join(rank: int, world: int) -> None:
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)


def part_of(rank: int, shape: tuple[int, ...] = (6, 5)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def reduced(average: bool) -> torch.Tensor:
    """This rank's part of the sum or average of every rank's ``part_of``."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    source, output = part_of(rank), torch.empty(6 // world, 5)
    cuda_calls.reduce_scatter_tensor(output, source, op=OP.AVG if average else OP.SUM)
    assert torch.equal(source, part_of(rank)), "the source was changed"
    return output


def gathered() -> torch.Tensor:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    output = torch.empty(6 * world, 5)
    cuda_calls.all_gather_into_tensor(output, part_of(rank))
    return output


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(2, f"{__name__}:join")
    yield pool
    pool.stop()


@pytest.mark.guard
@pytest.mark.parametrize("average", (False, True), ids=("sum", "average"))
def test_reduce_scatter_is_torchs_sum_and_mean(ranks, average):
    every = torch.stack([part_of(rank) for rank in range(2)])
    expected = every.mean(0) if average else every.sum(0)
    found = torch.cat(ranks.run(f"{__name__}:reduced", average=average))
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.guard
def test_all_gather_is_torchs_cat(ranks):
    expected = torch.cat([part_of(rank) for rank in range(2)])
    for found in ranks.run(f"{__name__}:gathered"):
        assert torch.equal(found, expected)


@pytest.mark.guard
def test_histc_counts_integers_as_bincount():
    view, values = cuda_calls.Torch(), torch.tensor([3, 0, 3, 1, 3, 2, 0])
    counts = view.histc(values, bins=5, min=0, max=5)
    assert counts.dtype == values.dtype and torch.equal(counts, torch.bincount(values, minlength=5))
    floats = part_of(0).abs()
    assert torch.allclose(view.histc(floats, bins=4, min=0, max=2), torch.histc(floats, 4, 0, 2), rtol=0, atol=1e-6)


@pytest.mark.guard
def test_cuda_is_the_cpu_and_the_rest_is_torch():
    view = cuda_calls.Torch()
    assert view.device("cuda", 0) == view.device("cuda:0") == torch.device("cpu")
    zeros = view.zeros(2, 3, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(zeros, torch.zeros(2, 3, dtype=torch.bfloat16)) and not zeros.is_cuda
    assert view.randn is torch.randn and view.cuda.is_available is torch.cuda.is_available


@pytest.mark.guard
def test_type_names_are_cudas_for_a_while():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        plain = torch.zeros(1, dtype=dtype).type()
        with cuda_calls.cuda_type_names():
            assert torch.zeros(1, dtype=dtype).type() == plain.replace("torch.", "torch.cuda.")
            assert torch.zeros(1).type(dtype).dtype == dtype
        assert torch.zeros(1, dtype=dtype).type() == plain
