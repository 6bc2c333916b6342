"""FP8: 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa; Micikevicius et al., 2022), with a scale an output.

Few rows are multiplied as they are by the widened weight, which is exact but for the weight and is bound by memory all
the same; many rows are rounded to FP8 too, with a scale a token, for the matrix units that take both.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import device_on_cuda
from quire.kernels.gemm import fp8_linear
from quire.kernels.gemm.fp8_linear import E4M3
from quire.quantization.base import (
    ALL_ROWS,
    ExpertMatrices,
    Matrix,
    Norm,
    Rows,
    Spec,
    Tensors,
    WeightFormat,
    scale_exactly,
)
from quire.quantization.experts import StackedExperts

LARGEST = 448.0  # of e4m3
LEAST = 1e-30  # a line of zeros has some scale
LINES = 4096
_NEEDS = "8-bit floats need a GPU"
_WITHOUT = ("mps",)  # devices on which torch has no 8-bit floats


class Fp8Matrix(Matrix):
    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.scale, self.bias = weight, scale, bias
        self.takes_fp8_rows = fp8_linear.takes_rows(weight)

    def dense(self, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        return fp8_linear.widened(self.weight[rows], self.scale[rows], dtype)

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return (self.weight, self.scale) if self.bias is None else None

    def linear(
        self,
        x: Rows,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        reader: Matrix | None = None,
    ) -> Rows:
        return fp8_linear.linear(
            x, self.weight, self.scale, self.bias, norm=norm, gated=gated, residual=residual, out_dtype=out_dtype,
            out=out, narrow=reader is not None and reader.takes_fp8_rows,
        )  # fmt: skip


class Fp8Channel(WeightFormat):
    """weight e4m3 [n, k] and weight_scale float32 [n]: the matrix is weight · weight_scale[:, None]."""

    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Spec]:  # noqa: ARG002 (the same for all)
        return {"weight": Spec((rows, columns), E4M3), "weight_scale": Spec((rows,), torch.float32)}

    def pack(self, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """The largest number of an output becomes the largest of e4m3. Some lines at a time: what they are on the way
        takes no more than the matrix itself."""
        scale = torch.linalg.vector_norm(dense, torch.inf, dim=1, dtype=torch.float32).div_(LARGEST).clamp_min_(LEAST)
        weight = torch.empty(dense.shape, dtype=E4M3, device=dense.device)
        for lines in range(0, len(dense), LINES):
            part = slice(lines, lines + LINES)
            weight[part] = (dense[part].float() / scale[part, None]).to(E4M3)
        return {"weight": weight, "weight_scale": scale}

    def matrix(self, tensors: Tensors, bias: torch.Tensor | None) -> Fp8Matrix:
        return Fp8Matrix(tensors["weight"], tensors["weight_scale"], bias)

    def scale_rows(self, tensors: Tensors, powers: torch.Tensor) -> None:
        scale_exactly(tensors["weight_scale"], powers)

    def experts(self, gate_up: Tensors, down: Tensors, down_format: WeightFormat | None = None) -> ExpertMatrices:
        if type(down_format or self) is not type(self):
            return super().experts(gate_up, down, down_format)
        return StackedExperts(gate_up["weight"], down["weight"], (gate_up["weight_scale"], down["weight_scale"]))

    def refuses(self, device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG002 (the same for all)
        if device_on_cuda(device):
            return None if fp8_linear.has_matrix_units(device) else f"{_NEEDS} of compute capability 8.9 or more"
        return f"{_NEEDS}: {device.type} does not know them" if device.type in _WITHOUT else None
