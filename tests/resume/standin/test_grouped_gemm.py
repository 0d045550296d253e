"""The grouped matmul stand-in against torch's batched one, values and gradients, in fp32 to 1e-6."""

from __future__ import annotations

import pytest
import torch

from resume.standin.grouped_gemm import gmm


@pytest.mark.guard
@pytest.mark.parametrize("trans_b", (False, True))
def test_groups_are_multiplied_as_torch_does_one_by_one(trans_b):
    generator = torch.Generator().manual_seed(5)
    sizes = torch.tensor([3, 0, 2])
    a = torch.randn(5, 4, generator=generator).requires_grad_()
    b = torch.randn((3, 6, 4) if trans_b else (3, 4, 6), generator=generator).requires_grad_()
    own = torch.repeat_interleave(b.transpose(1, 2) if trans_b else b, sizes, dim=0)
    expected = torch.bmm(a.unsqueeze(1), own).squeeze(1)
    found = gmm(a, b, sizes, trans_b=trans_b)
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    weight = torch.randn(found.shape, generator=generator)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), (a, b)),
        torch.autograd.grad((expected * weight).sum(), (a, b)),
        strict=True,
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)
