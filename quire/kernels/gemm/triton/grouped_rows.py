"""x @ weight.T for up to 16 rows and a weight in codes, as the tall operand on the matrix units.

The warps of a program share K (SPLIT), a block of 128 columns each at a time. Where a block lies in one group its sums
are scaled, else its weights are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gemm.codes import Codes
from quire.kernels.gemm.triton.codes import arguments, centred, constants, decoded, scaled_by
from quire.kernels.triton.launch import cdiv, has_pdl


@triton.jit(do_not_specialize=["M"])
def _grouped_rows_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, out_ptr, M, N,
    x_stride, codes_stride, groups, out_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    KIND: tl.constexpr, NIBBLES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OUTER: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 64 if NIBBLES else 128
    PARTS: tl.constexpr = 1 if GROUP % 128 == 0 else 128 // GROUP  # of a block, with scales of their own
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    share = tl.arange(0, SPLIT)[:, None, None]
    byte, column = tl.arange(0, WIDTH)[None, None, :], tl.arange(0, 128)[None, None, :]
    rows = codes_ptr + n.to(tl.int64)[None, :, None] * codes_stride + share * WIDTH + byte  # [split, n, width]
    lines = x_ptr + m[None, :, None] * x_stride + share * 128 + column  # [split, m, 128]
    in_n, in_m = (n < N)[None, :, None], (m < M)[None, :, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([SPLIT, BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, SPLIT * 128, num_stages=STAGES):
        in_k = start + share * 128 < K
        first = tl.minimum(start + share * 128, K - 128)
        codes = tl.reshape(tl.load(rows + start // 128 * WIDTH, in_n & in_k, 0.0), [SPLIT * BLOCK_N, WIDTH])
        x = tl.load(lines + start, in_m & in_k, 0.0)
        weight = tl.reshape(decoded(codes, table_ptr, x, KIND), [SPLIT, BLOCK_N, PARTS, 128 // PARTS])
        group = (
            n[None, :, None, None] * groups + first[:, :, :, None] // GROUP + tl.arange(0, PARTS)[None, None, :, None]
        )
        weight = centred(weight, zero_ptr, group, in_n[:, :, :, None], ZERO, KIND)
        scale = scaled_by(tl.load(scale_ptr + group, in_n[:, :, :, None], 0.0))
        if PARTS == 1:
            weight = tl.reshape(weight, [SPLIT, BLOCK_N, 128]).to(x.dtype)
            scale = tl.reshape(scale, [SPLIT, BLOCK_N, 1])
            acc += tl.dot(weight, tl.permute(x, (0, 2, 1)), input_precision=PRECISION) * scale
        else:
            weight = tl.reshape((weight.to(tl.float32) * scale).to(x.dtype), [SPLIT, BLOCK_N, 128])
            acc += tl.dot(weight, tl.permute(x, (0, 2, 1)), input_precision=PRECISION)
    y = tl.sum(acc, axis=0)  # [outputs, rows]
    if OUTER:
        y *= tl.load(outer_ptr + n, n < N, 0.0)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[:, None]
    out = out_ptr + m[None, :] * out_stride + n[:, None]
    in_out = (m < M)[None, :] & (n < N)[:, None]
    if RESIDUAL:
        y += tl.load(out, in_out, 0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), in_out)


def linear(
    x: torch.Tensor, weight: Codes, bias: torch.Tensor | None, residual: bool, out: torch.Tensor, warps: int = 4
) -> torch.Tensor:
    """x [m, k] → out [m, n], m <= 16; with `residual` the result is added to what stands there."""
    (m, k), n = x.shape, out.shape[1]
    pdl = has_pdl(x.device)
    _grouped_rows_kernel[(cdiv(n, 16),)](
        x, *arguments(weight), x if bias is None else bias, out, m, n,
        x.stride(0), weight.codes.stride(0), weight.scale.shape[1], out.stride(0),
        K=k, BLOCK_M=8 if m <= 8 else 16, BLOCK_N=16, SPLIT=warps, **constants(weight),
        BIAS=bias is not None, RESIDUAL=residual, STAGES=4, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
