"""Stand-in for ``grouped_gemm.ops``, the CUDA kernel under megatron-core's GroupedMLP."""

from __future__ import annotations

import torch


def gmm(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """Rows of ``a`` [rows, k], in groups of ``batch_sizes`` [groups], times their group's matrix of ``b``: [rows, n].

    ``b`` is [groups, k, n], or [groups, n, k] where ``trans_b``.
    """
    parts = a.split(batch_sizes.tolist())
    return torch.cat([part @ (w.T if trans_b else w) for part, w in zip(parts, b, strict=True)])
