"""RMS norm and gate behind a scan, computed in float32."""

from __future__ import annotations

import torch


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, groups: int = 1, gate_first: bool = True
) -> torch.Tensor:
    """norm(x · silu(gate)) · weight, or with the gate behind: norm(x) · weight · silu(gate); each of `groups` parts of
    a line normed by itself.

    Shapes:
        x, gate: [tokens, size]. weight: [size]. Returns [tokens, size] of x's type.
    """
    wide, factor = x.float(), torch.nn.functional.silu(gate.float())
    if gate_first:
        wide = wide * factor
    parts = wide.unflatten(-1, (groups, -1))
    normed = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.float()
    y: torch.Tensor = normed if gate_first else normed * factor
    return y.to(x.dtype)
