"""INT8 on both sides: a scale an output, activations rounded by row, or by a scale (and a zero) that the checkpoint has
for them."""

from __future__ import annotations

import torch

from quire.kernels.gemm import codes, int8_linear
from quire.kernels.gemm.codes import Codes
from quire.kernels.gemm.int8_linear import Int8Weight
from quire.quantization.base import (
    ALL_ROWS,
    EachExpert,
    ExpertMatrices,
    Matrix,
    Norm,
    Rows,
    Spec,
    Tensors,
    WeightFormat,
    scale_exactly,
)
from quire.quantization.grouped import CodedExperts


class Int8RowsMatrix(Matrix):
    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def dense(self, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        return self.weight.values[rows].float().mul_(self.weight.scale[rows, None]).to(dtype)

    def linear(
        self,
        x: Rows,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        reader: Matrix | None = None,  # noqa: ARG002 (rounds its rows itself)
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return int8_linear.linear(
            x, self.weight, self.bias, norm=norm, gated=gated, residual=residual, out_dtype=out_dtype, out=out
        )


class Int8Rows(WeightFormat):
    """weight int8 [n, k], weight_scale float32 [n].

    fixed: activations have one scale, input_scale float32 [1]. zero: and input_zero float32 [1], with weight_sums
    float32 [n], of the rows of weight.
    """

    def __init__(self, *, fixed: bool = False, zero: bool = False) -> None:
        self.fixed, self.zero = fixed, zero

    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Spec]:  # noqa: ARG002 (the same for all)
        kept = {"weight": Spec((rows, columns), torch.int8), "weight_scale": Spec((rows,), torch.float32)}
        if self.fixed:
            kept["input_scale"] = Spec((1,), torch.float32)
        if self.zero:
            kept |= {"input_zero": Spec((1,), torch.float32), "weight_sums": Spec((rows,), torch.float32)}
        return kept

    def pack(self, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scales of activations are made for those of about unit size: nothing better is known of them."""
        weight, scale, _, _ = codes.nearest(dense, "int8", dense.shape[1], torch.float32, None, outer=False)
        return self.packed(weight, scale[:, 0], dense.new_full((1,), 0.05), dense.new_zeros((1,)))

    def packed(
        self, weight: torch.Tensor, scale: torch.Tensor, x_scale: torch.Tensor, x_zero: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The tensors of a weight int8 [n, k]; of x_scale and x_zero those that the format has."""
        kept = {"weight": weight, "weight_scale": scale}
        if self.fixed:
            kept["input_scale"] = x_scale.float()
        if self.zero:
            kept |= {"input_zero": x_zero.float(), "weight_sums": weight.sum(1, dtype=torch.float32)}
        return kept

    def scale_rows(self, tensors: Tensors, powers: torch.Tensor) -> None:
        scale_exactly(tensors["weight_scale"], powers)

    def experts(self, gate_up: Tensors, down: Tensors, down_format: WeightFormat | None = None) -> ExpertMatrices:
        """Their rows are met as they are: no kernel of theirs takes integers on both sides."""
        each = EachExpert((self, gate_up), (down_format or self, down))
        if not isinstance(down_format or self, Int8Rows):
            return each
        return CodedExperts(_codes(gate_up), _codes(down), each)

    def matrix(self, tensors: Tensors, bias: torch.Tensor | None) -> Int8RowsMatrix:
        more = (tensors.get(name) for name in ("input_scale", "input_zero", "weight_sums"))
        return Int8RowsMatrix(Int8Weight(tensors["weight"], tensors["weight_scale"], *more), bias)


def _codes(experts: Tensors) -> Codes:
    weight, scale = experts["weight"], experts["weight_scale"]
    return Codes("int8", weight.shape[-1], weight, scale[..., None])
