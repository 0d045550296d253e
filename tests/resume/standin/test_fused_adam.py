"""The FusedAdam stand-in against torch's own optimizers, fp32, to 1e-6 relative."""

import pytest
import torch

from resume.standin.fused_adam import Applier, multi_tensor_adam


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 3), (17,), (2, 2, 2))]


@pytest.mark.guard
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "l2"])
def test_ten_steps_equal_torchs(decoupled, weight_decay):
    ours = tensors()
    theirs = [torch.nn.Parameter(t.clone()) for t in ours]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    peer = kind(theirs, lr=1e-2, betas=(0.8, 0.95), eps=1e-8, weight_decay=weight_decay)
    first, second = [torch.zeros_like(t) for t in ours], [torch.zeros_like(t) for t in ours]
    start = [t.clone() for t in ours]
    for step in range(1, 11):
        grads = [torch.sin(t * step) for t in ours]
        for param in theirs:
            param.grad = torch.sin(param.detach() * step)
        peer.step()
        lists = [grads, ours, first, second]
        Applier()(multi_tensor_adam, None, lists, 1e-2, 0.8, 0.95, 1e-8, step, int(decoupled), 1, weight_decay)
    assert all((a - b).abs().max() > 0.01 for a, b in zip(ours, start, strict=True))
    for mine, param in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, param.detach(), rtol=1e-6, atol=1e-6)
    for i, param in enumerate(theirs):
        torch.testing.assert_close(first[i], peer.state[param]["exp_avg"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(second[i], peer.state[param]["exp_avg_sq"], rtol=1e-6, atol=1e-6)


@pytest.mark.guard
def test_an_overflow_flag_leaves_everything_alone():
    ours = tensors()
    before = [t.clone() for t in ours]
    lists = [tensors(), ours, tensors(), tensors()]
    multi_tensor_adam(0, torch.ones(1, dtype=torch.int), lists, 1e-2, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))


@pytest.mark.guard
def test_without_bias_correction_the_first_step_is_the_raw_moments():
    param, grad = torch.tensor([1.0]), torch.tensor([0.5])
    exp_avg, exp_avg_sq = torch.zeros(1), torch.zeros(1)
    multi_tensor_adam(0, None, [[grad], [param], [exp_avg], [exp_avg_sq]], 1.0, 0.9, 0.99, 0.0, 1, 1, 0, 0.0)
    torch.testing.assert_close(param, torch.tensor([1.0 - 0.05 / 0.0025**0.5]), rtol=1e-6, atol=1e-6)
