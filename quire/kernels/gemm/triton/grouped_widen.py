"""A weight in codes to one of floats, in one pass: for so many rows that the library's product outweighs it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gemm.codes import Codes
from quire.kernels.gemm.triton.codes import arguments, centred, constants, decoded, scaled_by, values
from quire.kernels.triton.launch import has_pdl

BLOCK_N = 16


@triton.jit
def _store_part(
    wide, out, at, columns, inside, outer, scale_ptr, zero_ptr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    group = at + columns // GROUP
    wide = centred(wide, zero_ptr, group, inside, ZERO, KIND) * scaled_by(tl.load(scale_ptr + group, inside, 0.0))
    tl.store(out + columns, (wide * outer).to(out.dtype.element_ty), inside)


@triton.jit
def _grouped_widen_kernel(
    codes_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, wanted_ptr, out_ptr, N, K, rows_each, codes_stride, groups,
    BLOCK_N: tl.constexpr, KIND: tl.constexpr, NIBBLES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    OUTER: tl.constexpr, WANTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = 64 if NIBBLES else 128
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    first = tl.program_id(1) * 128
    in_n = n < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if WANTED:
        in_n = in_n & (tl.load(wanted_ptr + n // rows_each, in_n, 0) > 0)
    columns = tl.minimum(K - first, 128)
    byte = tl.arange(0, WIDTH)[None, :]
    codes_at = codes_ptr + n.to(tl.int64) * codes_stride + first // 128 * WIDTH + byte
    outer = tl.full([BLOCK_N, 1], 1.0, tl.float32)
    if OUTER:
        outer = tl.load(outer_ptr + n, in_n, 0.0)
    out = out_ptr + n.to(tl.int64) * K
    at, like = n * groups, tl.zeros([1, 1], tl.float32)
    if columns == 128 or not NIBBLES:
        column = tl.arange(0, 128)[None, :]
        whole = tl.load(codes_at, in_n & (byte < columns), 0.0)
        wide = decoded(whole, table_ptr, like, KIND)
        _store_part(
            wide, out, at, first + column, in_n & (column < columns), outer, scale_ptr, zero_ptr, KIND, GROUP, ZERO
        )
    else:
        half = columns // 2
        in_half = in_n & (byte < half)
        pairs = tl.load(codes_at, in_half, 0.0)
        low, high = values(pairs & 15, table_ptr, like, KIND), values(pairs >> 4, table_ptr, like, KIND)
        _store_part(low, out, at, first + byte, in_half, outer, scale_ptr, zero_ptr, KIND, GROUP, ZERO)
        _store_part(high, out, at, first + half + byte, in_half, outer, scale_ptr, zero_ptr, KIND, GROUP, ZERO)


def widened(weight: Codes, dtype: torch.dtype, wanted: torch.Tensor | None = None) -> torch.Tensor:
    """What the codes stand for [n, k], computed in float32 and rounded once.

    wanted: int32, of each of so many equal shares of the rows: not 0 for those that are; the others hold anything.
    """
    n, k = len(weight.codes), weight.columns
    out = torch.empty((n, k), dtype=dtype, device=weight.codes.device)
    pdl = has_pdl(out.device)
    _grouped_widen_kernel[(triton.cdiv(n, BLOCK_N), triton.cdiv(k, 128))](
        *arguments(weight), weight.codes if wanted is None else wanted, out, n, k,
        n if wanted is None else n // len(wanted), weight.codes.stride(0), weight.scale.shape[1], BLOCK_N=BLOCK_N,
        **constants(weight), WANTED=wanted is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
