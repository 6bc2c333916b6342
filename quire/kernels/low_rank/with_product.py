"""A product of few rows, and what their adapters' first factors make of the same rows: at once."""

from __future__ import annotations

import torch

from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm import decode_gemm
from quire.kernels.low_rank.factors import Factors
from quire.kernels.low_rank.rows import AdapterRows


def linear_and_shrink(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    rows: AdapterRows,
    factors: Factors,
    *,
    summed: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`kernels.gemm.linear.linear(x, weight, bias, norm=norm)`, and `kernels.low_rank.product.shrink` of the same x;
    None: not at once.

    Of one row the factor's lines are some more of the product's. Of more rows they are a kernel of their own, which is
    in place as soon as x is there, and reads them while the product reads its weight.

    summed: the product is a part of a sum, and cut up as such are.
    """
    if not len(x) or factors.down.dtype != weight.dtype:
        return None
    plan = decode_gemm.plan(x, weight, gated=False, residual=summed)
    if plan is None:
        return None
    from quire.kernels.gemm.triton import skinny_vector
    from quire.kernels.gemm.triton.plan import Vector
    from quire.kernels.low_rank.triton import product

    if isinstance(plan, Vector):
        if norm is not None and (plan.apart or x.dtype == torch.float16):  # times the gain it may leave its range
            x, norm = rms_norm(x, *norm), None
        y = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
        inner = torch.empty((1, 1, factors.down.shape[1]), dtype=torch.float32, device=x.device)
        down = skinny_vector.Down(factors, rows.slots, inner)
        return skinny_vector.linear(x, weight, bias, norm, False, False, y, plan, down), inner
    if rows.tiles is None or not product.in_registers(rows.tiles, factors):
        return None
    from quire.kernels.low_rank.triton import shrink_registers

    if norm is not None:
        x = rms_norm(x, *norm, early=True)
    inner = shrink_registers.room_for(x, factors)  # not what the product has given back, but may still use
    y = decode_gemm.linear(x, weight, bias, None, False, None, None, None, plan, late=True)
    return y, shrink_registers.shrink(x, rows, factors, inner, beside=True)
