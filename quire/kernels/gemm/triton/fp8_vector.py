"""x @ (weight · scale).T for one row and a weight of 8-bit floats, on the ordinary cores: `skinny_vector` for these.

The loop over K is unrolled: carried from turn to turn, a tile of bytes would be taken apart and put together again. As
tiles have half the bytes, two of them are on their way at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gemm.triton.plan import Vector
from quire.kernels.triton.launch import cdiv, has_pdl


@triton.jit
def _tile(rows, in_n, k, START: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    if START + BLOCK_K <= K:
        weight = tl.load(rows + (START + k)[None, :], in_n, 0.0)
    else:
        weight = tl.load(rows + (START + k)[None, :], in_n & (START + k < K)[None, :], 0.0)
    return weight


@triton.jit
def _fp8_vector_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, gain_ptr, out_ptr, N, weight_stride, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight_ptr + n.to(tl.int64)[:, None] * weight_stride
    ups = weight_ptr + (N + n).to(tl.int64)[:, None] * weight_stride
    in_n = (n < N)[:, None]
    weight = _tile(rows, in_n, k, 0, K, BLOCK_K)
    next_weight = weight
    if BLOCK_K < K:
        next_weight = _tile(rows, in_n, k, BLOCK_K, K, BLOCK_K)
    up_weight = weight
    next_up = weight
    if GATED:
        up_weight = _tile(ups, in_n, k, 0, K, BLOCK_K)
        next_up = up_weight
        if BLOCK_K < K:
            next_up = _tile(ups, in_n, k, BLOCK_K, K, BLOCK_K)
    scale = tl.load(scale_ptr + n, n < N, 0.0)
    up_scale = scale
    if GATED:
        up_scale = tl.load(scale_ptr + N + n, n < N, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    residual = 0.0
    if RESIDUAL:
        residual = tl.load(out_ptr + n, n < N, 0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        x = tl.load(x_ptr + start + k, start + k < K, 0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(gain_ptr + start + k, start + k < K, 0.0).to(tl.float32)
        now = weight
        weight = next_weight
        now_up = up_weight
        up_weight = next_up
        if start + 2 * BLOCK_K < K:
            next_weight = _tile(rows, in_n, k, start + 2 * BLOCK_K, K, BLOCK_K)
            if GATED:
                next_up = _tile(ups, in_n, k, start + 2 * BLOCK_K, K, BLOCK_K)
        acc += x[None, :] * now.to(tl.float32)
        if GATED:
            acc_up += x[None, :] * now_up.to(tl.float32)
    y = tl.sum(acc, axis=1) * scale
    up = tl.sum(acc_up, axis=1) * up_scale
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= factor
        up *= factor
    if BIAS:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + N + n, n < N, 0.0).to(tl.float32)
    if GATED:
        y = y * tl.sigmoid(y) * up
    tl.store(out_ptr + n, (y + residual).to(out_ptr.dtype.element_ty), n < N)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: bool,
    out: torch.Tensor,
    plan: Vector,
) -> torch.Tensor:
    """x [1, k] → out [1, n]; with `residual` the result is added to what stands there. weight e4m3 and scale float32 of
    its lines. See `quire.kernels.gemm.linear`."""
    k, n = x.shape[1], out.shape[1]
    gain, eps = norm or (x, 0.0)
    pdl = has_pdl(x.device)
    _fp8_vector_kernel[(cdiv(n, plan.outputs),)](
        x, weight, scale, scale if bias is None else bias, gain, out, n, weight.stride(0), eps, K=k,
        BLOCK_N=plan.outputs, BLOCK_K=plan.width, NORM=norm is not None, GATED=gated, BIAS=bias is not None,
        RESIDUAL=residual, PDL=pdl, num_warps=plan.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
