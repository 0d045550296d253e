"""Stand-in for ``multi_tensor_adam``, the CUDA kernel under DeepSpeed's and Apex's FusedAdam.

Same arguments, same in-place results in plain torch; used only where the
machine has no CUDA.  Parity with ``torch.optim.AdamW`` and ``Adam`` is tested
in ``tests/resume/standin/test_fused_adam.py``.
"""

from __future__ import annotations

import torch


def multi_tensor_adam(
    chunk_size,
    noop_flag,
    tensor_lists,
    lr,
    beta1,
    beta2,
    eps,
    step,
    adam_w_mode,
    bias_correction,
    weight_decay,
    *_unused,
) -> None:
    """One Adam step over ``tensor_lists`` = [grads, params, exp_avgs, exp_avg_sqs], all updated in place.

    ``adam_w_mode`` 1 decouples the weight decay (AdamW), 0 adds it to the gradient (L2).
    Arithmetic in fp32 whatever the params' dtype, as the kernel does.
    """
    if noop_flag is not None and noop_flag.item():
        return
    first = 1 - beta1**step if bias_correction else 1.0
    second = 1 - beta2**step if bias_correction else 1.0
    for grad, param, exp_avg, exp_avg_sq in zip(*tensor_lists[:4], strict=True):
        g, p = grad.float(), param.detach().float()
        if not adam_w_mode and weight_decay:
            g = g + weight_decay * p
        m = exp_avg.detach().float().mul(beta1).add(g, alpha=1 - beta1)
        v = exp_avg_sq.detach().float().mul(beta2).addcmul(g, g, value=1 - beta2)
        update = (m / first) / ((v / second).sqrt() + eps)
        if adam_w_mode and weight_decay:
            update = update + weight_decay * p
        with torch.no_grad():
            exp_avg.copy_(m)
            exp_avg_sq.copy_(v)
            param.copy_(p - lr * update)


class Applier:
    """Stand-in for ``MultiTensorApply``: calls the op on whole lists."""

    available = True

    def __init__(self, chunk_size: int = 2048 * 32):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag, tensor_lists, *args):
        return op(self.chunk_size, noop_flag, tensor_lists, *args)
