"""x @ weight.T for up to 16 rows: the kernel that the table names."""

from __future__ import annotations

import torch

from quire.kernels.triton import skinny_registers, skinny_shared, skinny_vector
from quire.kernels.triton.skinny_gemm_table import Plan, Registers, Vector


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: bool,
    out: torch.Tensor,
    plan: Plan,
) -> torch.Tensor:
    """x [m, k] → out [m, n]; with `residual` the result is added to what stands there. See `quire.kernels.linear`."""
    if isinstance(plan, Registers):
        return skinny_registers.linear(x, weight, bias, norm, gated, residual, out, plan)
    if norm is not None or gated:
        raise ValueError(f"{plan} has neither norm nor gate")
    if isinstance(plan, Vector):
        return skinny_vector.linear(x, weight, bias, residual, out, plan)
    return skinny_shared.linear(x, weight, bias, residual, out, plan)
