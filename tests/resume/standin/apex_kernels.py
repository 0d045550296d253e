"""Stand-ins for the CUDA kernels under Apex's FusedAdam and DistributedFusedAdam.

Same arguments, same in-place results in plain torch, all on the arithmetic of
``fused_adam.multi_tensor_adam``; used only where the machine has no CUDA.
Parity is tested in ``tests/resume/standin/test_apex_kernels.py``.
"""

from __future__ import annotations

import sys
import types

import torch

from resume.standin.fused_adam import multi_tensor_adam


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale) -> None:
    """``out = in * scale`` for [ins, outs]; the flag is raised where an input is not finite."""
    for source, dest in zip(*tensor_lists, strict=False):
        if noop_flag is not None and not torch.isfinite(source).all():
            noop_flag.fill_(1)
        dest.copy_(source.float() * scale)


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    """L2 norm over all tensors of the one list, [1], and of each where ``per_tensor``."""
    each = torch.stack([t.detach().float().norm() for t in tensor_lists[0]])
    return each.norm().view(1), each if per_tensor else each.new_empty(0)


def maybe_cast_mt(chunk_size, overflow_flag, tensor_lists) -> None:
    """Copy each of [ins] to its one of [outs], cast to its dtype."""
    for source, dest in zip(*tensor_lists, strict=False):
        dest.copy_(source)


def _step(param, exp_avg, exp_avg_sq, grad, grad_scale, hyper) -> None:
    """One step of fp32 ``param`` and its moments in place; ``hyper`` as ``multi_tensor_adam`` takes it."""
    multi_tensor_adam(0, None, [[grad.float() * grad_scale], [param], [exp_avg], [exp_avg_sq]], *hyper)


def multi_tensor_fused_adam(chunk_size, noop_flag, tensor_lists, grad_scale, *hyper) -> None:
    """One step over [params_in, exp_avgs, exp_avg_sqs, grads, params_out].

    ``hyper``: lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay; mode 1 decouples the weight decay.
    """
    for param_in, exp_avg, exp_avg_sq, grad, param_out in zip(*tensor_lists, strict=False):
        param = param_in.detach().float()
        _step(param, exp_avg, exp_avg_sq, grad, grad_scale, hyper)
        param_in.copy_(param)
        param_out.copy_(param)


def join_bf16(high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """fp32 from bf16 values, rounded half up, and the signed lower 16 bits they were rounded from."""
    bits = high.view(torch.int16).int() - (remainder < 0).int()
    return ((bits << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def split_bf16(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse of ``join_bf16``: (bf16, int16)."""
    bits = value.contiguous().view(torch.int32)
    remainder = (bits & 0xFFFF).to(torch.int16)
    return ((bits >> 16) + (remainder < 0).int()).to(torch.int16).view(torch.bfloat16), remainder


def multi_tensor_fused_adam_with_param_remainders(chunk_size, noop_flag, tensor_lists, grad_scale, *hyper) -> None:
    """One step over [bf16 params_in, remainders, exp_avgs, exp_avg_sqs, grads, bf16 params_out]."""
    for param_in, remainder, exp_avg, exp_avg_sq, grad, param_out in zip(*tensor_lists, strict=False):
        param = join_bf16(param_in.detach(), remainder)
        _step(param, exp_avg, exp_avg_sq, grad, grad_scale, hyper)
        high, low = split_bf16(param)
        param_out.copy_(high)
        remainder.copy_(low)


def _unused(*_args, **_kwargs):
    raise NotImplementedError("a CUDA kernel that no test needs")


def install() -> None:
    """Make ``amp_C``, ``fused_adam_cuda`` and ``distributed_adam_cuda`` importable."""
    modules = {
        "amp_C": {
            "multi_tensor_scale": multi_tensor_scale,
            "multi_tensor_l2norm": multi_tensor_l2norm,
            "multi_tensor_adam": multi_tensor_adam,
            "multi_tensor_adam_capturable": _unused,
            "multi_tensor_adam_capturable_master": _unused,
        },
        "fused_adam_cuda": {"maybe_cast_mt": maybe_cast_mt},
        "distributed_adam_cuda": {
            "multi_tensor_fused_adam": multi_tensor_fused_adam,
            "multi_tensor_fused_adam_with_param_remainders": multi_tensor_fused_adam_with_param_remainders,
        },
    }
    for name, functions in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(functions)
        sys.modules[name] = module
