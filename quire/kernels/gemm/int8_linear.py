"""x @ weight.T for 8-bit integers on both sides: rows of x are rounded to int8 with a scale each, or with one for all,
the sums are exact integers, and scales come behind them.

On a GPU that is two kernels: one rounds, behind the norm, the other multiplies with all that stands behind a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.elementwise.activation import silu_and_mul
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm.int8_plan import plan

LARGEST = 127.0
LEAST = 1e-30  # a row of zeros has some scale
LINE = 16  # bytes; what lines of both operands are multiples of


class Int8Weight(NamedTuple):
    """values int8 [n, k] times scale float32 [n].

    x_scale, x_zero: float32 [n of parts], of x where they are fixed; a number q stands for (q - zero) * scale. sums:
    float32 [n], of each row of values, with x_zero.
    """

    values: torch.Tensor
    scale: torch.Tensor
    x_scale: torch.Tensor | None = None
    x_zero: torch.Tensor | None = None
    sums: torch.Tensor | None = None


def linear(
    x: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `quire.kernels.gemm.linear`."""
    if on_triton(x) and weight.values.stride(0) % LINE == 0:
        return _by_kernels(x, weight, bias, norm, gated, residual, out_dtype, out)
    y = product(x if norm is None else rms_norm(x, *norm), weight, bias)
    if gated:
        return silu_and_mul(y.to(x.dtype))
    if residual is not None:
        return residual.add_(y)
    return out.copy_(y) if out is not None else y.to(out_dtype or x.dtype)


def _by_kernels(
    x: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    from quire.kernels.gemm.triton import int8_rows
    from quire.kernels.triton.launch import num_processors

    values, row_scale = int8_rows.rounded(x, norm, weight.x_scale, weight.x_zero)
    m, n = len(x), len(weight.values) // (2 if gated else 1)
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((m, n), dtype=out_dtype or x.dtype, device=x.device)
    zero = None if weight.x_zero is None or weight.sums is None else (weight.x_zero, weight.sums)
    return int8_rows.product(
        values, row_scale, weight.values, weight.scale, zero, bias, out,
        plan(m, n, gated=gated, processors=num_processors(x.device)),
        fixed=weight.x_scale is not None, gated=gated, adds=residual is not None,
    )  # fmt: skip


def rounded(x: torch.Tensor, weight: Int8Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k] → int8 [m, k] and the scale float32 [m, 1], or [1], that they are to be multiplied by."""
    wide = x.float()
    if weight.x_scale is None:
        scale = wide.abs().amax(1, keepdim=True).clamp_min_(LEAST) / LARGEST
        return (wide / scale).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scale
    values = (wide / weight.x_scale).round_()
    if weight.x_zero is not None:
        values += weight.x_zero
    return values.clamp_(-128, 127).to(torch.int8), weight.x_scale


def product(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [m, k] of floats → float32 [m, n], by torch."""
    values, scale = rounded(x, weight)
    sums = _sums(values, weight.values).float()
    if weight.x_zero is not None:
        assert weight.sums is not None
        sums -= weight.x_zero * weight.sums
    y = sums.mul_(scale).mul_(weight.scale)
    return y if bias is None else y.add_(bias)


def _sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int8 [m, k] @ int8 [n, k].T → int32 [m, n]."""
    if x.is_cuda:  # whose product of integers is the library's alone, of some shapes; exact up to k = 2^39
        return (x.double() @ weight.double().t()).int()
    return torch._int_mm(x, weight.t()) if len(x) else x.new_empty((0, len(weight)), dtype=torch.int32)
