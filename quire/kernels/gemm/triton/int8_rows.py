"""x @ weight.T for 8-bit integers on both sides: rows of x are rounded in one kernel, with the norm before it; the
product's own kernel does everything behind it: scales, bias, gate and the sum with the residual.

The weight is the tall operand. Sums are exact, and so it does not matter who adds them up in which order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gemm.int8_plan import Plan
from quire.kernels.triton.launch import cdiv, has_pdl, next_power_of_2

LARGEST = 127.0
LEAST = 1e-30  # a row of zeros has some scale
MAX_BLOCK = 16384  # columns that are held in registers; longer rows are read twice


@triton.jit
def _nearest(x):
    """To the next integer, halves to even ones: behind 2^23 the places after the point are gone."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _of_row(x_ptr, gain_ptr, columns, size, NORM: tl.constexpr):
    mask = columns < size
    x = tl.load(x_ptr + columns, mask, 0.0).to(tl.float32)
    y = x
    if NORM:
        y = x * tl.load(gain_ptr + columns, mask, 0.0).to(tl.float32)
    return x, y


@triton.jit
def _round_kernel(
    x_ptr, gain_ptr, fixed_ptr, zero_ptr, out_ptr, scale_ptr, x_stride, size, eps, LARGEST, LEAST,
    BLOCK: tl.constexpr, ONE: tl.constexpr, NORM: tl.constexpr, FIXED: tl.constexpr, ZERO: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_ptr += row * x_stride
    out_ptr += row * size
    x, y = _of_row(x_ptr, gain_ptr, columns, size, NORM)
    largest = tl.max(tl.abs(y), axis=0)
    squares = tl.sum(x * x, axis=0)
    if not ONE:
        for start in range(BLOCK, size, BLOCK):
            more_x, more = _of_row(x_ptr, gain_ptr, start + columns, size, NORM)
            largest = tl.maximum(largest, tl.max(tl.abs(more), axis=0))
            squares += tl.sum(more_x * more_x, axis=0)
    norm = 1.0
    if NORM:
        norm = tl.rsqrt(squares / size + eps)
    zero = 0.0
    if FIXED:
        factor = norm / tl.load(fixed_ptr)
        if ZERO:
            zero = tl.load(zero_ptr)
    else:
        scale = tl.maximum(largest, LEAST) / LARGEST
        factor = 1.0 / scale
        tl.store(scale_ptr + row, scale * norm)
    narrow = tl.clamp(_nearest(y * factor) + zero, -LARGEST - (1.0 if FIXED else 0.0), LARGEST).to(tl.int8)
    tl.store(out_ptr + columns, narrow, columns < size)
    if not ONE:
        for start in range(BLOCK, size, BLOCK):
            _, more = _of_row(x_ptr, gain_ptr, start + columns, size, NORM)
            narrow = tl.clamp(_nearest(more * factor) + zero, -LARGEST - (1.0 if FIXED else 0.0), LARGEST).to(tl.int8)
            tl.store(out_ptr + start + columns, narrow, start + columns < size)


def rounded(
    x: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
    fixed: torch.Tensor | None,
    zero: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k], behind an RMS norm or as it is → int8 [m, k] and float32 scales, [m] or the fixed one [1]."""
    m, k = x.shape
    out = torch.empty((m, k), dtype=torch.int8, device=x.device)
    scale = torch.empty((m,), dtype=torch.float32, device=x.device) if fixed is None else fixed
    if m:
        gain, eps = norm or (x, 0.0)
        block, pdl = min(next_power_of_2(k), MAX_BLOCK), has_pdl(x.device)
        _round_kernel[(m,)](
            x, gain, scale, scale if zero is None else zero, out, scale, x.stride(0), k, eps, LARGEST, LEAST,
            BLOCK=block, ONE=k <= block, NORM=norm is not None, FIXED=fixed is not None, ZERO=zero is not None,
            PDL=pdl, num_warps=min(max(block // 512, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return out, scale


@triton.jit
def _behind(sums, n, in_n, row_scale, scale_ptr, zero, sums_ptr, bias_ptr, ZERO: tl.constexpr, BIAS: tl.constexpr):
    """Of sums [outputs, rows] what the product is."""
    y = sums.to(tl.float32)
    if ZERO:
        y -= zero * tl.load(sums_ptr + n, in_n, 0.0)[:, None]
    y = y * row_scale * tl.load(scale_ptr + n, in_n, 0.0)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + n, in_n, 0.0).to(tl.float32)[:, None]
    return y


@triton.jit(do_not_specialize=["M"])
def _int8_kernel(
    x_ptr, w_ptr, row_scale_ptr, scale_ptr, zero_ptr, sums_ptr, bias_ptr, out_ptr, M, N, K,
    x_stride, w_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    GATED: tl.constexpr, FIXED: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    number = tl.program_id(0)
    strip = number // (GROUP * tiles_n)  # of so many tiles of rows, which share what they read of the weight
    height = tl.minimum(tiles_m - strip * GROUP, GROUP)
    inside = number - strip * GROUP * tiles_n
    m = (strip * GROUP + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (inside // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_m, in_n = m < M, n < N
    lines = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    weights = w_ptr + n.to(tl.int64)[:, None] * w_stride + k[None, :]
    ups = weights + N * w_stride.to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        in_k = (start + k < K)[None, :]
        x = tl.load(lines + start, in_m[:, None] & in_k, 0)
        weight = tl.load(weights + start, in_n[:, None] & in_k, 0)
        acc = tl.dot(weight, tl.trans(x), acc, out_dtype=tl.int32)
        if GATED:
            up = tl.load(ups + start, in_n[:, None] & in_k, 0)
            acc_up = tl.dot(up, tl.trans(x), acc_up, out_dtype=tl.int32)
    zero = 0.0
    if ZERO:
        zero = tl.load(zero_ptr)
    if FIXED:
        row_scale = tl.load(row_scale_ptr)
    else:
        row_scale = tl.load(row_scale_ptr + m, in_m, 0.0)[None, :]
    y = _behind(acc, n, in_n, row_scale, scale_ptr, zero, sums_ptr, bias_ptr, ZERO, BIAS)
    if GATED:
        up = _behind(acc_up, n, in_n, row_scale, scale_ptr + N, zero, sums_ptr + N, bias_ptr + N, ZERO, BIAS)
        y = y * tl.sigmoid(y) * up
    out = out_ptr + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    in_out = in_m[None, :] & in_n[:, None]
    if RESIDUAL:
        y += tl.load(out, in_out, 0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), in_out)


def product(
    values: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: tuple[torch.Tensor, torch.Tensor] | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    plan: Plan,
    *,
    fixed: bool,
    gated: bool,
    adds: bool,
) -> torch.Tensor:
    """values int8 [m, k] with scales float32 [m], [1] if fixed; weight int8 [n, k] with scale float32 [n] → out [m, n],
    of half as many columns if gated. zero: that of values, float32 [1], and the sum of each line of the weight, float32
    [n]. adds: to what stands in out."""
    (m, k), n = values.shape, out.shape[1]
    if not m:
        return out
    pdl = has_pdl(values.device)
    of_zero, sums = zero or (scale, scale)
    _int8_kernel[(cdiv(m, plan.block_m) * cdiv(n, plan.block_n),)](
        values, weight, row_scale, scale, of_zero, sums, scale if bias is None else bias, out, m, n, k,
        values.stride(0), weight.stride(0), out.stride(0),
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, GROUP=8, GATED=gated,
        FIXED=fixed, ZERO=zero is not None, BIAS=bias is not None, RESIDUAL=adds,
        STAGES=plan.stages, PDL=pdl, num_warps=plan.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
