"""The matrices of many experts in the formats that kernels have."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import device_on_cuda
from quire.kernels.gemm.fp8_linear import E4M3, Fp8Rows
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
        self.takes_narrow = gate_up.dtype == E4M3 and device_on_cuda(gate_up.device)

    def add(
        self,
        x: torch.Tensor,
        routes: Routes,
        residual: torch.Tensor | None,
        norm: Norm | None = None,
        inside: Inside = USUAL,
        narrow: Fp8Rows | None = None,
    ) -> torch.Tensor:
        return add_experts(x, routes, self.gate_up, self.down, residual, self.scales, norm, inside, narrow)
