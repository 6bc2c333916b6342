"""A gate behind a mixer, alone or with an RMS norm, computed in float32. It opens by its SiLU or, if so said, by its
sigmoid."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    width: int,
    gate_first: bool = True,
    sigmoid: bool = False,
) -> torch.Tensor:
    """norm(x · open(gate)) · weight, or with the gate behind: norm(x) · weight · open(gate); each part of `width`
    columns normed by itself.

    Shapes:
        x: contiguous [tokens, size]. gate: [tokens, size], of any stride between tokens. weight: [size], or [width] if
        all parts have the same. Returns [tokens, size] of x's type.
    """
    if on_triton(x):
        from quire.kernels.elementwise.triton import gated_norm as on_gpu

        return on_gpu.gated_norm(x, gate, weight, eps, width=width, gate_first=gate_first, sigmoid=sigmoid)
    wide, factor = x.float(), _opened(gate, sigmoid)
    if gate_first:
        wide = wide * factor
    parts = wide.unflatten(-1, (-1, width))
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    normed = (normed * weight.float().view(-1, width)).flatten(-2)
    y: torch.Tensor = normed if gate_first else normed * factor
    return y.to(x.dtype)


def gate_only(x: torch.Tensor, gate: torch.Tensor, *, sigmoid: bool = False) -> torch.Tensor:
    """x · open(gate) alone; shapes as above."""
    if on_triton(x):
        from quire.kernels.elementwise.triton import gated_norm as on_gpu

        return on_gpu.gate_only(x, gate, sigmoid=sigmoid)
    return (x.float() * _opened(gate, sigmoid)).to(x.dtype)


def _opened(gate: torch.Tensor, sigmoid: bool) -> torch.Tensor:
    return torch.sigmoid(gate.float()) if sigmoid else torch.nn.functional.silu(gate.float())
