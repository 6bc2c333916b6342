"""RMS norm (Zhang and Sennrich, 2019): x / sqrt(mean(x²) + eps) · weight, computed in float32."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_cpu, on_triton
from quire.kernels.elementwise import cpu as cpu_elementwise


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, early: bool = False) -> torch.Tensor:
    """Normalize the last dimension of x [..., hidden] by its root mean square; weight [hidden]. Keeps x's dtype.

    early: the next kernel may start before this one has what it waits for (`kernels/triton/launch.py`).
    """
    if on_triton(x):
        from quire.kernels.elementwise.triton import norm

        return norm.rms_norm(x, weight, eps, early=early)
    return cpu_elementwise.rms_norm(x, weight, eps) if on_cpu(x) else rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
