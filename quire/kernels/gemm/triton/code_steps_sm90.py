"""Codes (`kernels/gemm/codes.py`) from shared memory to the matrix units of compute capability 9.0, in Gluon: a step of
64 lines of the weight and 64 columns at a time, scaled on the way.

A block of 128 columns lies in shared memory as 64 lines of 64 bytes, words of 4-bit codes, or as two of these, bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from quire.kernels.gemm.triton.code_bytes import byte_factors, byte_operands, byte_shift, pairs_layout
from quire.kernels.gemm.triton.code_words import factors, half_layout, scaled_operands, shift, word_halves, word_layout


@gluon.constexpr_function
def is_bytes(kind):
    return kind in (1, 2)


@gluon.constexpr_function
def _halves(group):
    """Of a block, that have scales of their own."""
    return 1 if group >= 128 else 2


@gluon.constexpr_function
def _parts(group):
    """Of half a block in bytes, that have scales of their own."""
    return max(64 // group, 1)


@gluon.jit
def _words(w_tiles, index):
    """Of 64 lines the words of a block [1, 64, 16]: a thread has 16 bytes in a row."""
    ROWS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]], lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 16],
    )  # fmt: skip
    words = w_tiles.index(index).load(ROWS).reshape([1, 64, 16])
    return gl.convert_layout(words, word_layout(64, 4, False), assert_trivial=True)


@gluon.jit
def scales_of(
    scale_ptr, zero_ptr, first, lines, groups, block,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
):  # fmt: skip
    """Scales and zeros of 64 lines from `first` on, for a block or each half of it: [1, 64, 1], or of each word
    [1, 64, 8]; for bytes [64, parts, 1]. Behind the last of `lines`, and of a line's groups, there are some.

    Exponents that lie by two (`codes.by_two`) are one a half, for both words of a pair."""
    PARTS: gl.constexpr = _parts(GROUP)
    BY_TWO: gl.constexpr = scale_ptr.dtype.element_ty == gl.int16
    if is_bytes(KIND):
        parted = gl.zeros([64, 32], gl.int16, pairs_layout()).reshape([64, PARTS, 32 // PARTS])
        line = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, parted.type.layout)))[:, None, None]
        part = gl.arange(0, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, parted.type.layout)))[None, :, None]
        column = part * (64 // PARTS)
    else:
        line = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, half_layout())))[None, :, None]
        column = 0
        if GROUP < 64 and not BY_TWO:  # a word's columns are 32 in a row
            column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, half_layout())))[None, None, :] % 2 * 32
    line = gl.minimum(first + line, lines - 1) * groups
    scales = ()
    zeros = ()
    for half in gl.static_range(_halves(GROUP)):
        at = line + gl.minimum((block * 128 + half * 64 + column) // (64 if BY_TWO else GROUP), groups - 1)
        scales += (gl.load(scale_ptr + at),)
        if ZERO:
            zeros += (gl.load(zero_ptr + at),)
        else:
            zeros += (8,)
    return scales, zeros


@gluon.jit
def _known_of(scale, zero, like: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr):
    if is_bytes(KIND):
        known = byte_factors(scale, zero, like, KIND, ZERO)
    elif scale.dtype == gl.int16:
        word = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, half_layout())))[None, None, :]
        own = (scale.to(gl.int32) >> (word % 2 * 8)) & 255
        known = factors(own.to(gl.uint8), zero, like, KIND, ZERO)
    else:
        known = factors(scale, zero, like, KIND, ZERO)
    return known


@gluon.jit
def known_halves(scales, zeros, like: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr):
    """What operands are made with, of a block's first half and of its last."""
    first = _known_of(scales[0], zeros[0], like, KIND, ZERO)
    if len(scales) > 1:
        last = _known_of(scales[1], zeros[1], like, KIND, ZERO)
    else:
        last = first
    return first, last


@gluon.constexpr_function
def _last_layout(tail):
    """Of words [64, 16] of which a thread has `tail`, 1 or 2, and then nothing."""
    words = [[0, 1 << i] for i in range(4)]
    registers, threads = ([words[0], words[3]], words[1:3]) if tail == 2 else (words[2:], words[:2])
    return gl.DistributedLinearLayout(
        reg_bases=[*registers, [8, 0]], lane_bases=[*threads, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 16],
    )  # fmt: skip


@gluon.jit
def _last_words(w_tiles, index, TAIL: gl.constexpr):
    """Of 64 lines the words [1, 64, 16] of a block with 32 TAIL columns."""
    words = w_tiles.index(index).load(_last_layout(TAIL)).reshape([1, 64, 4 // TAIL, 4, TAIL]).permute([0, 1, 3, 2, 4])
    return gl.convert_layout(words.reshape([1, 64, 16]), word_layout(64, 4, False), assert_trivial=True)


@gluon.jit
def words_of(
    w_tiles, stage, is_last, HALF: gl.constexpr, HALVES: gl.constexpr, NUMBER: gl.constexpr, KIND: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """Of 64 lines' block the words, if these are codes: bytes are fetched when they are wanted. TAIL: words of a thread
    in a row's last block, where that is not whole."""
    if is_bytes(KIND):
        words = 0
    else:
        index = 2 * HALVES * stage + 2 * HALF + NUMBER
        words = _words(w_tiles, index)
        if TAIL > 0:
            words = gl.where(is_last, _last_words(w_tiles, index, TAIL), words)
    return words


@gluon.jit
def half_of(
    words, w_tiles, stage, HALF: gl.constexpr, HALVES: gl.constexpr, LATE: gl.constexpr, NUMBER: gl.constexpr,
    KIND: gl.constexpr,
):  # fmt: skip
    """The first or, LATE, the last 64 columns: words [1, 64, 8], or pairs of bytes [64, 32]."""
    if is_bytes(KIND):
        codes = w_tiles.index(4 * HALVES * stage + 4 * HALF + 2 * LATE + NUMBER).load(pairs_layout())
    else:
        codes = word_halves(words)[LATE]
    return codes


@gluon.jit
def multiply_step(codes, known, x_tile, acc, table_ptr, KIND: gl.constexpr, ZERO: gl.constexpr, LEFT: gl.constexpr):
    """Sends 64 lines and 64 columns to the matrix units; no more than these are under way then."""
    if is_bytes(KIND):
        wide = byte_operands(codes, known, x_tile.dtype, KIND, ZERO)
    else:
        wide = scaled_operands(codes, known, table_ptr, x_tile.dtype, KIND, ZERO)
        wide = wide.reshape([wide.shape[1], wide.shape[2]])
    left = gl.convert_layout(wide, LEFT, assert_trivial=True)
    acc = warpgroup_mma(left, x_tile, acc, is_async=True)
    return warpgroup_mma_wait(1, deps=[acc])


@gluon.constexpr_function
def shift_of(dtype, kind, zero):
    """By how much operands are too small: the factor."""
    return byte_shift(dtype, kind, zero) if is_bytes(kind) else shift(dtype, kind, zero)
