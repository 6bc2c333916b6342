"""x @ weight.T for 8-bit integers on both sides: rows of x are rounded to int8 with a scale each, or with one for all,
the sums are exact integers, and scales come behind them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.kernels.dispatch import on_cuda

LARGEST = 127.0
LEAST = 1e-30  # a row of zeros has some scale
FEWEST_ROWS, UNIT = 17, 8  # of the library's product on a GPU: rows at least, and what the other sides are multiples of


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
    """x [m, k] of floats → float32 [m, n]."""
    values, scale = rounded(x, weight)
    sums = _sums(values, weight.values).float()
    if weight.x_zero is not None:
        assert weight.sums is not None
        sums -= weight.x_zero * weight.sums
    y = sums.mul_(scale).mul_(weight.scale)
    return y if bias is None else y.add_(bias)


def _sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int8 [m, k] @ int8 [n, k].T → int32 [m, n]."""
    rows = len(x)
    if on_cuda(x):
        if x.shape[1] % UNIT or len(weight) % UNIT:  # shapes that the library does not take; exact up to k = 2^10
            return (x.double() @ weight.double().t()).int()
        x = torch.nn.functional.pad(x, (0, 0, 0, max(FEWEST_ROWS - rows, 0)))
    return torch._int_mm(x, weight.t())[:rows] if rows else x.new_empty((0, len(weight)), dtype=torch.int32)
