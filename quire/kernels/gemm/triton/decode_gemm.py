"""x @ weight.T for the rows of a decode batch: the kernel that a plan names, with kernels for what it lacks."""

from __future__ import annotations

import torch

from quire.kernels.elementwise.triton import activation, norm
from quire.kernels.gemm.triton import batch_gemm, fp8_rows, fp8_vector, skinny_registers, skinny_shared, skinny_vector
from quire.kernels.gemm.triton.plan import Ahead, Plan, Registers, Ring, Tiles, Vector


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gain: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: bool,
    out: torch.Tensor,
    plan: Plan,
    scale: torch.Tensor | None = None,
    *,
    late: bool = False,
) -> torch.Tensor:
    """x [m, k] → out [m, n]; with `residual` the result is added to what stands there. gain: weight [k] and eps of the
    norm. scale: float32, of each line of a weight of 8 bits. late: the next kernel, launched as a dependent one, starts
    when x is there, and not before. See `quire.kernels.gemm.linear`."""
    if isinstance(plan, Tiles):
        norm_weight, eps = gain or (None, 0.0)
        old = out if residual else None
        if scale is None:
            return batch_gemm.linear(x, weight, bias, norm_weight, eps, gated, old, out, plan, late=late)
        x, row_scale = fp8_rows.quantize(x) if gain is None else fp8_rows.rms_norm_quantize(x, *gain)
        return batch_gemm.linear(x, weight, bias, None, eps, gated, old, out, plan, scale, row_scale, late=late)
    if isinstance(plan, Ahead):
        from quire.kernels.gemm.triton import ahead_sm90

        assert bias is None
        assert not residual
        assert not late
        x = x if gain is None else norm.rms_norm(x, *gain, early=True)
        return ahead_sm90.linear(x, weight, out, plan, gated=gated)
    if isinstance(plan, Ring):
        from quire.kernels.gemm.triton import fp8_ring_sm90

        assert scale is not None
        if gain is not None and len(x) > 1:
            x, gain = norm.rms_norm(x, *gain, early=True), None
        return fp8_ring_sm90.linear(x, weight, scale, bias, gain, gated, residual, out, plan)
    if scale is not None and gain is not None and x.dtype == torch.float16:
        x, gain = norm.rms_norm(x, *gain), None  # x times the gain, not yet divided, may leave its range
    if isinstance(plan, Registers):
        return skinny_registers.linear(x, weight, bias, gain, gated, residual, out, plan, scale, late=late)
    if isinstance(plan, Vector):
        if gain is not None and plan.apart:
            x, gain = norm.rms_norm(x, *gain), None
        if scale is not None:
            return fp8_vector.linear(x, weight, scale, bias, gain, gated, residual, out, plan)
        return skinny_vector.linear(x, weight, bias, gain, gated, residual, out, plan)
    if gain is not None:
        x = norm.rms_norm(x, *gain, early=True)
    if not gated:
        return skinny_shared.linear(x, weight, bias, residual, out, plan, scale)
    both = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    skinny_shared.linear(x, weight, bias, False, both, plan, scale)
    return activation.silu_and_mul(both, out)
