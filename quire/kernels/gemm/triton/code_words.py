"""Codes of 4 bits (`kernels/gemm/codes.py`) from the words that memory has to operands of the matrix units, in Gluon.

A block of 128 columns is 16 words, four in a row a thread's. A word's 8 numbers are the thread's own pairs of one line
in two matrix instructions, the first of a pair in the low half and the second in the high one: so a mask takes both out
of a word at once, no number changes its thread, and what a line's group of 16 columns or more has in common can be
applied to sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _integers(is_half):
    """128 + code, or 1024 + code, put together from bits; and what is to be taken off added, in pairs."""
    kind, magic, one = ("f16x2", 0x64006400, 0x3C003C00) if is_half else ("bf16x2", 0x43004300, 0x3F803F80)
    text = "{ .reg .b32 w, y, one; "
    text += f"mov.b32 one, {one:#x}; "
    for pair in range(4):
        text += f"shr.b32 w, $8, {4 * pair}; " if pair else "mov.b32 w, $8; "
        text += f"lop3.b32 y, w, 0x000f000f, {magic:#x}, 0xea; "
        text += f"fma.rn.{kind} y, y, one, $9; "
        text += f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, y; "
    return text + "}"


@gluon.constexpr_function
def _floats(is_half):
    """The bits of e2m1 in place as a float's least exponents, times what these are too small by: exact."""
    kind, place, factor = ("f16x2", 9, 0x74007400) if is_half else ("bf16x2", 6, 0x7E807E80)
    text = "{ .reg .b32 w, y, by, none; "
    text += f"mov.b32 by, {factor:#x}; mov.b32 none, 0x80008000; "
    for pair in range(4):
        left = place - 4 * pair
        text += f"shl.b32 w, $8, {left}; " if left >= 0 else f"shr.b32 w, $8, {-left}; "
        text += f"and.b32 w, w, {0x00070007 << place:#x}; "
        text += f"shl.b32 y, $8, {12 - 4 * pair}; "
        text += "lop3.b32 y, y, 0x80008000, w, 0xea; "
        text += f"fma.rn.{kind} y, y, by, none; "
        text += f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, y; "
    return text + "}"


@gluon.constexpr_function
def _eight(dtype):
    return (dtype,) * 8


@gluon.constexpr_function
def word_layout(lines, warps, shared):
    """Of words [warps, lines, 16] if `shared`: the warps have shares of K; else [1, 16 warps, 16]. See `operands`."""
    per_warp = lines if shared else 16
    above = [[0, 8 << i, 0] for i in range((per_warp // 8).bit_length() - 1)]
    across = [[1 << i, 0, 0] if shared else [0, 16 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], *above],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=across,
        block_bases=[],
        shape=[warps if shared else 1, lines, 16],
    )


@gluon.jit
def negated_zeros(zero, like, KIND: gl.constexpr):
    """What `operands` adds to numbers of lines whose integers zero is (8 stands for none), as pairs of like's type."""
    if KIND == 0:
        if like == gl.bfloat16:
            bits = zero.to(gl.int32) | 0xC300
        else:
            bits = zero.to(gl.int32) | 0xE400
        bits = bits | bits << 16
    else:
        bits = zero.to(gl.int32)
    return bits


@gluon.jit
def operands(words, less, table_ptr, like: gl.constexpr, KIND: gl.constexpr):
    """words int32 [shares, lines, 16] → what their codes stand for, unscaled, [shares, lines, 128] of type `like`; or
    half of both. less: what `negated_zeros` made of the lines' zeros, [shares, lines, 1 or 16].

    All in the threads that they are in.
    """
    SHARES: gl.constexpr = words.shape[0]
    LINES: gl.constexpr = words.shape[1]
    EACH: gl.constexpr = words.shape[2] // 4
    if KIND == 0 or KIND == 3:
        HALF: gl.constexpr = like == gl.float16
        TEXT: gl.constexpr = _integers(HALF) if KIND == 0 else _floats(HALF)
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, less],
            dtype=_eight(like), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a = gl.load(table_ptr + (words & 15)).to(like)
        b = gl.load(table_ptr + (words >> 16 & 15)).to(like)
        c = gl.load(table_ptr + (words >> 4 & 15)).to(like)
        d = gl.load(table_ptr + (words >> 20 & 15)).to(like)
        e = gl.load(table_ptr + (words >> 8 & 15)).to(like)
        f = gl.load(table_ptr + (words >> 24 & 15)).to(like)
        g = gl.load(table_ptr + (words >> 12 & 15)).to(like)
        h = gl.load(table_ptr + (words >> 28 & 15)).to(like)
    # [shares, lines, words, second of a pair, 8 columns on, 16 columns on]
    y = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    y = y.reshape([SHARES, LINES, 4, EACH, 2, 2, 2]).permute([0, 1, 3, 6, 5, 2, 4])
    return y.reshape([SHARES, LINES, EACH * 32])


@gluon.jit
def word_halves(words):
    """[shares, lines, 16] → those of the first and of the last 64 columns, [shares, lines, 8]."""
    SHARES: gl.constexpr = words.shape[0]
    LINES: gl.constexpr = words.shape[1]
    first, last = words.reshape([SHARES, LINES, 4, 2, 2]).permute([0, 1, 2, 4, 3]).split()
    return first.reshape([SHARES, LINES, 8]), last.reshape([SHARES, LINES, 8])


@gluon.jit
def pieces(x, PARTS: gl.constexpr, OF_COLUMNS: gl.constexpr):
    """[shares, lines, columns] → as many pieces of neighbouring columns, or lines, a power of two."""
    parts = (x,)
    for level in gl.static_range(PARTS.bit_length() - 1):
        halves = ()
        for i in gl.static_range(1 << level):
            halves += _halves(parts[i], OF_COLUMNS)
        parts = halves
    return parts


@gluon.jit
def _halves(x, OF_COLUMNS: gl.constexpr):
    SHARES: gl.constexpr = x.shape[0]
    LINES: gl.constexpr = x.shape[1]
    COLUMNS: gl.constexpr = x.shape[2]
    if OF_COLUMNS:
        first, last = x.reshape([SHARES, LINES, 2, COLUMNS // 2]).permute([0, 1, 3, 2]).split()
    else:
        first, last = x.reshape([SHARES, 2, LINES // 2, COLUMNS]).permute([0, 2, 3, 1]).split()
    return first, last


@gluon.jit
def factor(scale):
    """A scale as float32; of 8 bits without a sign it is an exponent."""
    if scale.dtype == gl.uint8:
        bits = gl.maximum(scale.to(gl.int32) << 23, 1 << 22)
        y = bits.to(gl.float32, bitcast=True)
    else:
        y = scale.to(gl.float32)
    return y
