"""Matrices as they are, in floating point."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.kernels.attention.qkv import qkv_rope_write
from quire.kernels.gemm import in_parts
from quire.kernels.gemm.linear import linear
from quire.kernels.summands import Summands
from quire.quantization.base import (
    ALL_ROWS,
    ExpertMatrices,
    Matrix,
    MatrixInfo,
    Norm,
    QuantizationMethod,
    Rows,
    Scheme,
    Spec,
    Tensors,
    WeightFormat,
    plain_scheme,
    scale_exactly,
)
from quire.quantization.experts import StackedExperts

if TYPE_CHECKING:
    from quire.kernels.attention.rope import QkvTarget


class PlainMatrix(Matrix):
    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def dense(self, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        return self.weight[rows].to(dtype)

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return (self.weight, None) if self.bias is None else None

    def linear(
        self,
        x: Rows,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        reader: Matrix | None = None,  # noqa: ARG002 (takes them as they are)
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return linear(
            x, self.weight, self.bias, norm=norm, gated=gated, residual=residual, out_dtype=out_dtype, out=out
        )

    def summands(self, x: Rows, norm: Norm | None) -> Summands | None:
        assert isinstance(x, torch.Tensor)
        parts = 1 if norm is not None or self.bias is not None else in_parts.parts_to_sum(x, self.weight)
        return in_parts.linear(x, self.weight, parts) if parts > 1 else None

    def qkv_rope_write(self, x: torch.Tensor, norm: Norm | None, place: QkvTarget) -> torch.Tensor:
        return qkv_rope_write(x, self.weight, self.bias, norm, place)


class Plain(WeightFormat):
    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Spec]:
        return {"weight": Spec((rows, columns), dtype)}

    def pack(self, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": dense}

    def matrix(self, tensors: Tensors, bias: torch.Tensor | None) -> PlainMatrix:
        return PlainMatrix(tensors["weight"], bias)

    def scale_rows(self, tensors: Tensors, powers: torch.Tensor) -> None:
        scale_exactly(tensors["weight"], powers)

    def experts(self, gate_up: Tensors, down: Tensors, down_format: WeightFormat | None = None) -> ExpertMatrices:
        if type(down_format or self) is not type(self):
            return super().experts(gate_up, down, down_format)
        return StackedExperts(gate_up["weight"], down["weight"])


class Unquantized(QuantizationMethod):
    """Everything as the checkpoint has it."""

    def scheme(self, info: MatrixInfo) -> Scheme:
        return plain_scheme(info.dtype)
