"""RMS norm (Zhang and Sennrich, 2019): x / sqrt(mean(x²) + eps) · weight, computed in float32; and layer norm."""

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


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> torch.Tensor:
    """`residual += scale · rms_norm(x)` in place, rounded once; returns it. Both [rows, hidden], of one dtype."""
    if on_triton(x):
        from quire.kernels.elementwise.triton import norm

        return norm.add_rms_norm(residual, x, weight, eps, scale)
    return residual.add_(rms_norm(x, weight, eps), alpha=scale)


def rms_norm_pair(x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], eps: float) -> torch.Tensor:
    """RMS norms of two parts of each row of x [rows, columns], in place: of its first columns, as many as the first
    weight has, and of as many that follow as the second has. Returns x."""
    if on_triton(x):
        from quire.kernels.elementwise.triton import norm

        return norm.rms_norm_pair(x, weights, eps)
    first, second = (len(weight) for weight in weights)
    for part, weight in zip(x[:, : first + second].split([first, second], 1), weights, strict=True):
        part.copy_(rms_norm(part, weight, eps))
    return x


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) · weight + bias (Ba et al., 2016) of the last dimension of x [..., hidden], in
    float32; weight and bias [hidden], where there are any. Keeps x's dtype."""
    if on_triton(x):
        from quire.kernels.elementwise.triton import norm

        return norm.layer_norm(x, weight, bias, eps)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
