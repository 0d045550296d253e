"""Parity of the stand-ins with torch, in fp32 to 1e-6."""

from __future__ import annotations

import pytest
import torch

from resume.standin import apex_kernels as kernels

SHAPES = [(7,), (5, 3), (64,)]
HYPER = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def close(found, expected) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, expected, strict=True))


def arguments(step: int, mode: int, scale: float = 1.0):
    return (torch.tensor(scale), HYPER["lr"], *HYPER["betas"], HYPER["eps"], step, mode, 1, HYPER["weight_decay"])


@pytest.mark.parametrize("mode, cls", [(1, torch.optim.AdamW), (0, torch.optim.Adam)])
def test_distributed_step_is_torchs(mode, cls):
    params = [p.requires_grad_() for p in tensors(0)]
    optimizer = cls(params, **HYPER)
    ours, m, v, out = tensors(0), *([torch.zeros(s) for s in SHAPES] for _ in range(3))
    for step in range(1, 6):
        grads = tensors(step)
        for p, g in zip(params, grads, strict=False):
            p.grad = g / 4
        optimizer.step()
        kernels.multi_tensor_fused_adam(0, None, [ours, m, v, grads, out], *arguments(step, mode, 0.25))
        assert close(ours, [p.detach() for p in params]) and close(out, ours)
        assert close(m, [optimizer.state[p]["exp_avg"] for p in params])
        assert close(v, [optimizer.state[p]["exp_avg_sq"] for p in params])


def test_step_with_remainders_is_torchs():
    params = [p.requires_grad_() for p in tensors(0)]
    optimizer = torch.optim.AdamW(params, **HYPER)
    high, low = (list(t) for t in zip(*(kernels.split_bf16(p.detach()) for p in params), strict=False))
    m, v = ([torch.zeros(s) for s in SHAPES] for _ in range(2))
    for step in range(1, 6):
        grads = tensors(step)
        for p, g in zip(params, grads, strict=False):
            p.grad = g
        optimizer.step()
        out = [torch.empty_like(h) for h in high]
        kernels.multi_tensor_fused_adam_with_param_remainders(
            0, None, [high, low, m, v, grads, out], *arguments(step, 1)
        )
        high = out
        assert close([kernels.join_bf16(*pair) for pair in zip(high, low, strict=False)], [p.detach() for p in params])


def test_split_and_join_are_exact_and_round_half_up():
    bits = torch.tensor([0x3DCC8000, 0x3DCD8000, 0x3DCC7FFF, 0x3DCC8001, 0x3F800000], dtype=torch.int32)
    for value in (bits.view(torch.float32), -bits.view(torch.float32), *tensors(3)):
        high, low = kernels.split_bf16(value)
        assert torch.equal(kernels.join_bf16(high, low), value)
        assert torch.equal(high, ((value.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16))


def test_scale_norm_and_cast():
    source, dest = tensors(1), [torch.empty(s) for s in SHAPES]
    flag = torch.zeros(1, dtype=torch.int32)
    kernels.multi_tensor_scale(0, flag, [source, dest], 0.5)
    assert close(dest, [s * 0.5 for s in source]) and not flag.item()
    kernels.multi_tensor_scale(0, flag, [[torch.tensor([float("inf")])], [torch.empty(1)]], 1.0)
    assert flag.item()
    total, each = kernels.multi_tensor_l2norm(0, None, [source], True)
    assert close([total], [torch.cat([s.view(-1) for s in source]).norm().view(1)])
    assert close(each.unbind(), [s.norm() for s in source])
    half = [torch.empty(s, dtype=torch.float16) for s in SHAPES]
    kernels.maybe_cast_mt(0, None, [source, half])
    assert all(torch.equal(h, s.half()) for h, s in zip(half, source, strict=False))
