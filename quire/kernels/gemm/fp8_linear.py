"""x @ (weight · scale).T for a weight of 8-bit floats with a scale an output, with what stands around it in a layer.

On a GPU few rows go through kernels that widen the weight as they read it (`gemm_plan.plan_8_bits`). For more, rows are
rounded to 8 bits too, with a scale a row, and multiplied by the matrix units that take both: up to 64 rows in a kernel
with all that stands around, beyond by the library, with the norm or the gate before it and the rounding in one kernel.
Of few tiles the library has a faster kernel with one scale: the sum with the residual then does the scaling.
Shapes that neither takes, and a CPU, multiply by the widened weight.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from quire.kernels.dispatch import device_on_cuda, on_triton
from quire.kernels.elementwise.activation import silu_and_mul
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm import decode_gemm
from quire.kernels.gemm.linear import linear as plain_linear

E4M3 = torch.float8_e4m3fn
LIBRARY_TILE = 128  # rows and outputs
UNIT = 16  # bytes; what rows, outputs and distances of the library's and the copy engine's operands are multiples of


class Fp8Rows(NamedTuple):
    """Rows in 8 bits: values e4m3 [m, k] times scale float32 [m]."""

    values: torch.Tensor
    scale: torch.Tensor


def has_matrix_units(device: torch.device) -> bool:
    """Whether the library multiplies 8-bit floats with scales of rows and columns there, beside kernels of ours."""
    return device_on_cuda(device) and _multiplies_8_bits(device)


@cache
def _multiplies_8_bits(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def takes_rows(weight: torch.Tensor) -> bool:
    """Whether `linear` takes `Fp8Rows` for this weight."""
    n, k = weight.shape
    return n % UNIT == k % UNIT == weight.stride(0) % UNIT == 0 and has_matrix_units(weight.device)


def linear(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    narrow: bool = False,
) -> torch.Tensor | Fp8Rows:
    """weight e4m3 [n, k], scale float32 [n]; see `quire.kernels.gemm.linear` for the rest.

    x: `Fp8Rows` of such a product before, if `takes_rows`. narrow: the result may be `Fp8Rows`, where that is cheaper.
    """
    if isinstance(x, Fp8Rows):
        return _multiplied(x, weight, scale, bias, residual, out_dtype, out)
    how = decode_gemm.plan_8_bits(x, weight, gated=gated, residual=decode_gemm.adds_up(norm, residual, out))
    if how is not None:
        return decode_gemm.linear(x, weight, bias, norm, gated, residual, out_dtype, out, how, scale)
    if len(x) and x.dtype in (torch.bfloat16, torch.float16) and takes_rows(weight):
        return by_library(
            x, weight, scale, bias,
            norm=norm, gated=gated, residual=residual, out_dtype=out_dtype, out=out, narrow=narrow,
        )  # fmt: skip
    return plain_linear(
        x, widened(weight, scale, x.dtype), bias,
        norm=norm, gated=gated, residual=residual, out_dtype=out_dtype, out=out,
    )  # fmt: skip


def by_library(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    narrow: bool = False,
) -> torch.Tensor | Fp8Rows:
    """`linear`, of weights that take rows in 8 bits, for any number of them."""
    from quire.kernels.gemm.triton import fp8_rows

    rows = Fp8Rows(*(fp8_rows.quantize(x) if norm is None else fp8_rows.rms_norm_quantize(x, *norm)))
    if gated:
        y = _library(rows, weight, scale, bias)
        return Fp8Rows(*fp8_rows.silu_and_mul_quantize(y)) if narrow else silu_and_mul(y).to(x.dtype)
    return _multiplied(rows, weight, scale, bias, residual, out_dtype or x.dtype, out)


def rms_norm_both(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Fp8Rows]:
    """RMS norm of x [m, k]: as it is, and in 8 bits as well."""
    if on_triton(x):
        from quire.kernels.gemm.triton import fp8_rows

        wide, *narrow = fp8_rows.rms_norm_both(x, weight, eps)
        return wide, Fp8Rows(*narrow)
    wide = rms_norm(x, weight, eps)
    scale = wide.float().abs().amax(1).clamp_min(1e-30) / torch.finfo(E4M3).max
    return wide, Fp8Rows((wide.float() / scale[:, None]).to(E4M3), scale)


def widened(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight e4m3 [n, k] times scale [n], rounded to `dtype`: what the numbers stand for."""
    return weight.float().mul_(scale[:, None]).to(dtype)


def _library(rows: Fp8Rows, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In bfloat16, the one type that the library gives with scales of rows and columns."""
    own = bias is not None and bias.dtype == torch.bfloat16
    y = torch._scaled_mm(
        rows.values, weight.t(), scale_a=rows.scale[:, None], scale_b=scale[None, :], bias=bias if own else None,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    return y if bias is None or own else y.add_(bias)


def _multiplied(
    rows: Fp8Rows,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if residual is not None and bias is None and _leaves_processors_idle(len(rows.values), len(weight), weight.device):
        from quire.kernels.gemm.triton import fp8_rows

        one = _one(weight.device)
        y = torch._scaled_mm(
            rows.values, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return fp8_rows.add_scaled(y, rows.scale, scale, residual)
    y = _library(rows, weight, scale, bias)
    if residual is not None:
        return residual.add_(y)
    return out.copy_(y) if out is not None else y.to(out_dtype or y.dtype)


def _leaves_processors_idle(m: int, n: int, device: torch.device) -> bool:
    """Whether the library's kernel with scales of rows and columns, which does not share K out, has fewer tiles than
    there are processors. That with one scale has other ways; all scales are then left to who adds to the residual."""
    from quire.kernels.triton.launch import num_processors

    return -(-m // LIBRARY_TILE) * -(-n // LIBRARY_TILE) < num_processors(device)


@cache
def _one(device: torch.device) -> torch.Tensor:
    """It stays: graphs know where."""
    return torch.ones((), dtype=torch.float32, device=device)
