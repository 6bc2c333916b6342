"""A product of one row, and what its adapter's first factor makes of the row, in one kernel."""

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
    None: not in one kernel.

    summed: the product is a part of a sum, and cut up as such are.
    """
    if len(x) != 1 or factors.down.dtype != weight.dtype:
        return None
    plan = decode_gemm.plan(x, weight, gated=False, residual=summed)
    if plan is None:
        return None
    from quire.kernels.gemm.triton import skinny_vector
    from quire.kernels.gemm.triton.plan import Vector

    if not isinstance(plan, Vector):
        return None
    if norm is not None and (plan.apart or x.dtype == torch.float16):  # times the gain alone it may leave its range
        x, norm = rms_norm(x, *norm), None
    y = torch.empty((1, weight.shape[0]), dtype=x.dtype, device=x.device)
    inner = torch.empty((1, 1, factors.down.shape[1]), dtype=torch.float32, device=x.device)
    down = skinny_vector.Down(factors, rows.slots, inner)
    return skinny_vector.linear(x, weight, bias, norm, False, False, y, plan, down), inner
