"""x @ weight.T for the rows of a decode batch: the kernel that a plan names, with kernels for what it lacks."""

from __future__ import annotations

import torch

from quire.kernels.elementwise.triton import activation, norm
from quire.kernels.gemm.triton import batch_gemm, skinny_registers, skinny_shared, skinny_vector
from quire.kernels.gemm.triton.plan import Plan, Registers, Tiles, Vector


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gain: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: bool,
    out: torch.Tensor,
    plan: Plan,
) -> torch.Tensor:
    """x [m, k] → out [m, n]; with `residual` the result is added to what stands there. gain: weight [k] and eps of the
    norm. See `quire.kernels.gemm.linear`."""
    if isinstance(plan, Tiles):
        norm_weight, eps = gain or (None, 0.0)
        old = out if residual else None
        return batch_gemm.linear(x, weight, bias, norm_weight, eps, gated, old, out, plan)
    if isinstance(plan, Registers):
        return skinny_registers.linear(x, weight, bias, gain, gated, residual, out, plan)
    if isinstance(plan, Vector):
        if gain is not None and plan.apart:
            x, gain = norm.rms_norm(x, *gain), None
        return skinny_vector.linear(x, weight, bias, gain, gated, residual, out, plan)
    if gain is not None:
        x = norm.rms_norm(x, *gain, early=True)
    if not gated:
        return skinny_shared.linear(x, weight, bias, residual, out, plan)
    both = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    skinny_shared.linear(x, weight, bias, False, both, plan)
    return activation.silu_and_mul(both, out)
