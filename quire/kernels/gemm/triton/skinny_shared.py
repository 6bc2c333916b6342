"""x @ weight.T for 2 to 16 rows on the matrix units, the weight as the tall operand, through shared memory.

The warps of a program share K (SPLIT), not outputs. A weight of 8 bits is widened on its way from there to the matrix
units, and the sums are scaled by output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gemm.triton.fp8_widen import widened
from quire.kernels.gemm.triton.plan import Shared
from quire.kernels.triton.launch import cdiv, has_pdl


@triton.jit(do_not_specialize=["M"])
def _shared_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, M, N, x_stride, weight_stride, out_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    at = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]  # [split, k]
    rows = weight_ptr + n.to(tl.int64)[None, :, None] * weight_stride + at[:, None, :]  # [split, n, k]
    lines = x_ptr + m[None, :, None] * x_stride + at[:, None, :]  # [split, m, k]
    in_n, in_m = (n < N)[None, :, None], (m < M)[None, :, None]
    STEP: tl.constexpr = SPLIT * BLOCK_K
    EVEN: tl.constexpr = K % STEP == 0
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([SPLIT, BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        if EVEN:
            weight = tl.load(rows + start, in_n, 0.0)
            x = tl.load(lines + start, in_m, 0.0)
        else:
            in_k = (start + at < K)[:, None, :]
            weight = tl.load(rows + start, in_n & in_k, 0.0)
            x = tl.load(lines + start, in_m & in_k, 0.0)
        acc = tl.dot(widened(weight, x), tl.permute(x, (0, 2, 1)), acc, input_precision=PRECISION)
    y = tl.sum(acc, axis=0)  # [outputs, rows]
    if SCALED:
        y *= tl.load(scale_ptr + n, n < N, 0.0)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[:, None]
    out = out_ptr + m[None, :] * out_stride + n[:, None]
    in_out = (m < M)[None, :] & (n < N)[:, None]
    if RESIDUAL:
        y += tl.load(out, in_out, 0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), in_out)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: bool,
    out: torch.Tensor,
    plan: Shared,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [m, k] → out [m, n]; with `residual` the result is added to what stands there. scale: float32, of each line of
    a weight of 8 bits."""
    (m, k), n = x.shape, out.shape[1]
    pdl = has_pdl(x.device)
    _shared_kernel[(cdiv(n, plan.outputs),)](
        x, weight, weight if scale is None else scale, weight if bias is None else bias, out, m, n,
        x.stride(0), weight.stride(0), out.stride(0), K=k, BLOCK_M=8 if m <= 8 else 16, BLOCK_N=plan.outputs,
        BLOCK_K=plan.step, SPLIT=plan.warps, SCALED=scale is not None, BIAS=bias is not None,
        RESIDUAL=residual, STAGES=plan.stages, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", PDL=pdl,
        num_warps=plan.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
