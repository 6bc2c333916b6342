"""Feed-forward layers."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear.gate_up(hidden, intermediate, bias=bias)
        self.down_proj = Linear(intermediate, hidden, bias=bias, role="columns")

    def forward(self, residual: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """`residual += mlp(norm(residual))` in place, [tokens, hidden]; returns it."""
        inner = self.gate_up_proj(residual, norm, reader=self.down_proj)
        y: torch.Tensor = self.down_proj(inner, residual=residual)
        return y
