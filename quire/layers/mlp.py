"""Feed-forward layers."""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels.activation import silu_and_mul
from quire.layers.linear import Linear


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear.gate_up(hidden, intermediate, bias=bias)
        self.down_proj = Linear(intermediate, hidden, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return y
