"""A weight in codes to one of floats, in one pass: for so many rows that the library's product outweighs it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gemm.codes import Codes
from quire.kernels.gemm.triton.codes import arguments, centred, constants, decoded, scaled_by
from quire.kernels.triton.launch import has_pdl

BLOCK_N = 16


@triton.jit
def _store_part(
    codes, out, at, first, in_n, outer, scale_ptr, zero_ptr, table_ptr,
    KIND: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, WIDTH)[None, :]
    group = at + (first + j) // GROUP
    wide = decoded(codes, table_ptr, tl.zeros([1, 1], tl.float32), KIND, HIGH)
    wide = centred(wide, zero_ptr, group, in_n, ZERO, KIND) * scaled_by(tl.load(scale_ptr + group, in_n, 0.0)) * outer
    tl.store(out + first + j, wide.to(out.dtype.element_ty), in_n & (j >= 0))


@triton.jit
def _grouped_widen_kernel(
    codes_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, out_ptr, N, codes_stride, groups, out_stride,
    BLOCK_N: tl.constexpr, KIND: tl.constexpr, NIBBLES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    OUTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 64 if NIBBLES else 128
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    block = tl.program_id(1)
    in_n = n < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    codes = tl.load(codes_ptr + n.to(tl.int64) * codes_stride + block * WIDTH + tl.arange(0, WIDTH)[None, :], in_n, 0.0)
    outer = tl.full([BLOCK_N, 1], 1.0, tl.float32)
    if OUTER:
        outer = tl.load(outer_ptr + n, in_n, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    out = out_ptr + n.to(tl.int64) * out_stride
    at = n * groups
    _store_part(
        codes, out, at, block * 128, in_n, outer, scale_ptr, zero_ptr, table_ptr, KIND, False, GROUP, WIDTH, ZERO
    )
    if NIBBLES:
        _store_part(
            codes, out, at, block * 128 + 64, in_n, outer, scale_ptr, zero_ptr, table_ptr, KIND, True, GROUP, WIDTH,
            ZERO,
        )  # fmt: skip


def widened(weight: Codes, dtype: torch.dtype) -> torch.Tensor:
    """What the codes stand for [n, k], computed in float32 and rounded once."""
    n, k = len(weight.codes), weight.columns
    out = torch.empty((n, k), dtype=dtype, device=weight.codes.device)
    pdl = has_pdl(out.device)
    _grouped_widen_kernel[(triton.cdiv(n, BLOCK_N), k // 128)](
        *arguments(weight), out, n, weight.codes.stride(0), weight.scale.shape[1], out.stride(0), BLOCK_N=BLOCK_N,
        **constants(weight), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
