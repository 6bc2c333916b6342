"""FP8: 8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa; Micikevicius et al., 2022), with a scale an output.

`OnlineFp8` makes them of plain checkpoints while these are loaded. Few rows are multiplied as they are by the widened
weight, which is exact but for the weight and is bound by memory all the same; many rows are rounded to FP8 too, with a
scale a token, for the matrix units that take both.
"""

from __future__ import annotations

import torch

from quire.quantization.base import (
    ALL_ROWS,
    FLOATS,
    FORMATS,
    INPUTS,
    OUTPUTS,
    Matrix,
    MatrixInfo,
    QuantizationMethod,
    Scheme,
    Source,
    Spec,
    Tensors,
    WeightFormat,
    plain_scheme,
)

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3


class Fp8Matrix(Matrix):
    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.scale, self.bias = weight, scale, bias

    def dense(self, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        return (self.weight[rows].float() * self.scale[rows, None]).to(dtype)


class Fp8Channel(WeightFormat):
    """weight e4m3 [n, k] and weight_scale float32 [n]: the matrix is weight · weight_scale[:, None]."""

    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Spec]:  # noqa: ARG002 (the same for all)
        return {"weight": Spec((rows, columns), E4M3), "weight_scale": Spec((rows,), torch.float32)}

    def pack(self, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """The largest number of an output becomes the largest of e4m3; a scale of 1 where all are zero."""
        largest = dense.abs().amax(dim=1).float()
        scale = torch.where(largest > 0, largest / LARGEST, 1.0)
        return {"weight": (dense.float() / scale[:, None]).clamp_(-LARGEST, LARGEST).to(E4M3), "weight_scale": scale}

    def matrix(self, tensors: Tensors, bias: torch.Tensor | None) -> Fp8Matrix:
        return Fp8Matrix(tensors["weight"], tensors["weight_scale"], bias)


class OnlineFp8(QuantizationMethod):
    """Every matrix of a plain checkpoint but the head."""

    def __init__(self) -> None:
        self._format: WeightFormat = FORMATS.get("fp8")()

    def scheme(self, info: MatrixInfo) -> Scheme:
        if info.role == "vocabulary":
            return plain_scheme(info.dtype)
        source = Source("weight", (OUTPUTS, INPUTS), FLOATS, info.dtype)
        return Scheme(self._format, (source,), lambda read: self._format.pack(read["weight"]))

    def refuses(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return self._format.refuses(device, dtype)
