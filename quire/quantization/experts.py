"""The matrices of many experts in the formats that kernels have."""

from __future__ import annotations

import torch

from quire.kernels.moe.experts import add_experts
from quire.kernels.moe.inside import USUAL, Inside
from quire.kernels.moe.routes import Routes
from quire.quantization.base import ExpertMatrices, Norm


class StackedExperts(ExpertMatrices):
    """Formats that kernels have: numbers as they are, or of 8 bits with a scale an output.

    scales: of each line of gate_up and down, float32.
    """

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        self.gate_up, self.down, self.scales = gate_up, down, scales

    def add(
        self,
        x: torch.Tensor,
        routes: Routes,
        residual: torch.Tensor,
        norm: Norm | None = None,
        inside: Inside = USUAL,
    ) -> torch.Tensor:
        return add_experts(x, routes, self.gate_up, self.down, residual, self.scales, norm, inside)
