"""x @ weight.T for 17 to some hundred rows and a weight in codes: the weight as the tall operand, out of registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gemm.codes import Codes
from quire.kernels.gemm.triton.codes import arguments, centred, constants, decoded, scaled_by
from quire.kernels.triton.launch import cdiv, has_pdl

BLOCK_N = 64


@triton.jit(do_not_specialize=["M"])
def _grouped_tiles_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, out_ptr, M, N,
    x_stride, codes_stride, groups, out_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, NIBBLES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OUTER: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 64 if NIBBLES else 128
    PARTS: tl.constexpr = 1 if GROUP % 128 == 0 else 128 // GROUP  # of a block, with scales of their own
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    byte, column = tl.arange(0, WIDTH)[None, :], tl.arange(0, 128)[None, :]
    rows = codes_ptr + n.to(tl.int64)[:, None] * codes_stride + byte
    lines = x_ptr + m.to(tl.int64)[:, None] * x_stride + column
    in_n, in_m = (n < N)[:, None], (m < M)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, 128, num_stages=STAGES):
        codes = tl.load(rows + start // 128 * WIDTH, in_n, 0.0)
        x = tl.load(lines + start, in_m, 0.0)
        weight = tl.reshape(decoded(codes, table_ptr, x, KIND), [BLOCK_N, PARTS, 128 // PARTS])
        group = n[:, None, None] * groups + start // GROUP + tl.arange(0, PARTS)[None, :, None]
        weight = centred(weight, zero_ptr, group, in_n[:, :, None], ZERO, KIND)
        scale = scaled_by(tl.load(scale_ptr + group, in_n[:, :, None], 0.0))
        weight = tl.reshape((weight.to(tl.float32) * scale).to(x.dtype), [BLOCK_N, 128])
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    y = acc
    if OUTER:
        y *= tl.load(outer_ptr + n, n < N, 0.0)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    in_out = (m < M)[None, :] & (n < N)[:, None]
    if RESIDUAL:
        y += tl.load(out, in_out, 0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), in_out)


def linear(
    x: torch.Tensor, weight: Codes, bias: torch.Tensor | None, residual: bool, out: torch.Tensor
) -> torch.Tensor:
    """x [m, k] → out [m, n]; with `residual` the result is added to what stands there."""
    (m, k), n = x.shape, out.shape[1]
    block_m = 32 if m <= 32 else 64 if m <= 64 else 128
    pdl = has_pdl(x.device)
    _grouped_tiles_kernel[(cdiv(m, block_m), cdiv(n, BLOCK_N))](
        x, *arguments(weight), x if bias is None else bias, out, m, n,
        x.stride(0), weight.codes.stride(0), weight.scale.shape[1], out.stride(0),
        K=k, BLOCK_M=block_m, BLOCK_N=BLOCK_N, **constants(weight), BIAS=bias is not None, RESIDUAL=residual, STAGES=3,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
