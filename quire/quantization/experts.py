"""The matrices of many experts in the formats that kernels have."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import device_on_cuda, on_triton
from quire.kernels.gemm.fp8_linear import E4M3, Fp8Rows
from quire.kernels.moe.experts import add_experts
from quire.kernels.moe.inside import USUAL, Inside, Shared
from quire.kernels.moe.routes import Routes
from quire.kernels.summands import Summands
from quire.quantization.base import ExpertMatrices, Matrix, Norm


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

    def summands(
        self,
        x: torch.Tensor,
        routes: Routes,
        norm: Norm | None = None,
        inside: Inside = USUAL,
        narrow: Fp8Rows | None = None,
    ) -> torch.Tensor | Summands:
        if not on_triton(x) or routes.tiling is None or not len(x):
            return self.add(x, routes, None, norm, inside, narrow)
        from quire.kernels.moe.triton.experts import summands

        return summands(x, routes, self.gate_up, self.down, self.scales, norm, inside, narrow)

    def beside(self, gate_up: Matrix, down: Matrix, gate: torch.Tensor | None) -> Shared | None:
        first, second = gate_up.numbers(), down.numbers()
        if first is None or second is None or second[0].shape[1] % self.down.shape[2]:
            return None
        kinds = {(weight.dtype, scale is None) for weight, scale in (first, second)}
        if kinds != {(self.down.dtype, self.scales is None)}:
            return None
        scales = None if first[1] is None or second[1] is None else (first[1], second[1])
        return Shared(first[0], second[0], scales, gate)

    def add_with(
        self, shared: Shared, x: torch.Tensor, routes: Routes, residual: torch.Tensor | None, norm: Norm | None
    ) -> torch.Tensor:
        return add_experts(x, routes, self.gate_up, self.down, residual, self.scales, norm, shared=shared)
