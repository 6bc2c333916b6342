"""A weight in codes to one of floats, in one pass: for so many rows that the library's product outweighs it.

Of codes of 4 bits a program takes whole words, four in a row a thread, and computes where these are; only the rounded
numbers are put in the order of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gemm.codes import NIBBLES, Codes
from quire.kernels.gemm.triton.codes import arguments, centred, constants, scaled_by, values
from quire.kernels.triton.launch import cdiv, has_pdl

BLOCK_N = 32


@triton.jit
def _number(codes, table_ptr, KIND: tl.constexpr):
    """float32; an integer is put behind the bits of 2^23, whose last place counts ones."""
    if KIND == 0:
        y = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    else:
        y = values(codes, table_ptr, tl.zeros([1, 1], tl.float32), KIND)
    return y


@triton.jit
def _scaled(
    y, n, columns, inside, in_n, groups, scale_ptr, zero_ptr, outer_ptr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    at = n * groups + columns // GROUP
    y = centred(y, zero_ptr, at, inside, ZERO, KIND) * scaled_by(tl.load(scale_ptr + at, inside, 0.0))
    if OUTER:
        y *= tl.load(outer_ptr + n, in_n, 0.0)
    return y


@triton.jit
def _widen_bytes(
    codes_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, out_ptr, n, first, in_n, K, codes_stride, groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    column = first + tl.arange(0, 128)[None, :]
    inside = in_n & (column < K)
    codes = tl.load(codes_ptr + n.to(tl.int64) * codes_stride + column, inside, 0.0)
    y = values(codes, table_ptr, tl.zeros([1, 1], tl.float32), KIND)
    if GROUP % 128 == 0:
        y = _scaled(y, n, first, in_n, in_n, groups, scale_ptr, zero_ptr, outer_ptr, KIND, GROUP, ZERO, OUTER)
    else:
        y = _scaled(y, n, column, inside, in_n, groups, scale_ptr, zero_ptr, outer_ptr, KIND, GROUP, ZERO, OUTER)
    tl.store(out_ptr + n.to(tl.int64) * K + column, y.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _widen_block(
    words_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, out_ptr, n, first, in_n, K, words_stride, groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """Of 128 columns in words, which are in order of d and a, their numbers of e, b and c, and columns of a, b, c, d
    and e: see `gemm/codes.py`."""
    word, number = tl.arange(0, 16)[None, :, None], tl.arange(0, 8)[None, None, :]
    words = tl.load(words_ptr + n.to(tl.int64) * words_stride + first // 8 + tl.arange(0, 16)[None, :], in_n, 0)
    y = _number((words[:, :, None] >> (4 * number)) & 15, table_ptr, KIND)
    if GROUP % 128 == 0:
        place = tl.zeros([1, 1, 1], tl.int32)
    elif GROUP % 32 == 0:
        place = word % 4 * 32
    elif GROUP % 16 == 0:
        place = word % 4 * 32 + number // 2 % 2 * 16
    else:
        place = word % 4 * 32 + number // 2 % 2 * 16 + number % 2 * 8 + word // 4 * 2 + number // 4
    inside = in_n[:, :, None]
    y = _scaled(
        y, n[:, :, None], first + place, inside & (place >= 0), inside, groups, scale_ptr, zero_ptr, outer_ptr, KIND,
        GROUP, ZERO, OUTER,
    )  # fmt: skip
    y = tl.reshape(y.to(out_ptr.dtype.element_ty), [n.shape[0], 4, 4, 2, 2, 2])
    y = tl.reshape(tl.permute(y, (0, 2, 4, 5, 1, 3)), [n.shape[0], 128])
    tl.store(out_ptr + n.to(tl.int64) * K + first + tl.arange(0, 128)[None, :], y, in_n)


@triton.jit
def _widen_rest(
    codes_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, out_ptr, n, first, in_n, K, codes_stride, groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """Of fewer columns: threads have fewer words each, and what is less than a word's is packed by halves."""
    byte = tl.arange(0, 64)[None, :]
    words = (K - first) // 32
    each = tl.maximum(words, 1) * 4
    half = (K - first) % 32 // 2
    in_words = byte < words * 16
    inside = in_n & (byte < (K - first) // 2)
    pairs = tl.load(codes_ptr + n.to(tl.int64) * codes_stride + first // 2 + byte, inside, 0)
    for part in tl.static_range(2):
        of_words = byte % each // 4 * 32 + byte % 2 * 16 + part * 8 + byte // each * 2 + byte // 2 % 2
        column = first + tl.where(in_words, of_words, words * 32 + part * half + byte - words * 16)
        y = _number(((pairs >> (4 * part)) & 15).to(tl.int32), table_ptr, KIND)
        y = _scaled(y, n, column, inside, in_n, groups, scale_ptr, zero_ptr, outer_ptr, KIND, GROUP, ZERO, OUTER)
        tl.store(out_ptr + n.to(tl.int64) * K + column, y.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _grouped_widen_kernel(
    codes_ptr, words_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, wanted_ptr, out_ptr, N, K, rows_each,
    codes_stride, groups,
    BLOCK_N: tl.constexpr, KIND: tl.constexpr, NIBBLES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    OUTER: tl.constexpr, WANTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    first = tl.program_id(1) * 128
    in_n = n < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if WANTED:
        in_n = in_n & (tl.load(wanted_ptr + n // rows_each, in_n, 0) > 0)
    if not NIBBLES:
        _widen_bytes(
            codes_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, out_ptr, n, first, in_n, K, codes_stride, groups,
            KIND, GROUP, ZERO, OUTER,
        )  # fmt: skip
    elif K - first >= 128:
        _widen_block(
            words_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, out_ptr, n, first, in_n, K, codes_stride // 4, groups,
            KIND, GROUP, ZERO, OUTER,
        )  # fmt: skip
    else:
        _widen_rest(
            codes_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, out_ptr, n, first, in_n, K, codes_stride, groups,
            KIND, GROUP, ZERO, OUTER,
        )  # fmt: skip


def widened(weight: Codes, dtype: torch.dtype, wanted: torch.Tensor | None = None) -> torch.Tensor:
    """What the codes stand for [n, k], computed in float32 and rounded once.

    wanted: int32, of each of so many equal shares of the rows: not 0 for those that are; the others hold anything.
    """
    n, k = len(weight.codes), weight.columns
    out = torch.empty((n, k), dtype=dtype, device=weight.codes.device)
    pdl = has_pdl(out.device)
    codes, *others = arguments(weight)
    _grouped_widen_kernel[(cdiv(n, BLOCK_N), cdiv(k, 128))](
        codes, codes.view(torch.int32) if weight.kind in NIBBLES else codes, *others,
        codes if wanted is None else wanted, out, n, k, n if wanted is None else n // len(wanted), codes.stride(0),
        weight.scale.shape[1], BLOCK_N=BLOCK_N, **constants(weight), WANTED=wanted is not None, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
