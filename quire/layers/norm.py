"""RMS norm, alone or fused with the residual sum before it."""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels import norm


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] → the same, normed."""
        return norm.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual += x` in place; returns the normed sum."""
        return norm.add_rms_norm(x, residual, self.weight, self.eps)
