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
def _integers(is_half, apart):
    """128 + code, or 1024 + code, put together from bits; and what is to be taken off added, in pairs: of zeros that
    are no integers what these are `apart` from one, since the sum of both would be rounded."""
    kind, magic, one = ("f16x2", 0x64006400, 0x3C003C00) if is_half else ("bf16x2", 0x43004300, 0x3F803F80)
    text = "{ .reg .b32 w, y, one; "
    text += f"mov.b32 one, {one:#x}; "
    for pair in range(4):
        text += f"shr.b32 w, $8, {4 * pair}; " if pair else "mov.b32 w, $8; "
        text += f"lop3.b32 y, w, 0x000f000f, {magic:#x}, 0xea; "
        text += f"fma.rn.{kind} y, y, one, $9; "
        text += f"add.rn.{kind} y, y, $10; " if apart else ""
        text += f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, y; "
    return text + "}"


@gluon.constexpr_function
def _integers_scaled(is_half, once):
    """A code is as many of a float's least steps (2^-133, or 2^-24) where it stands, its upper bits no further than in
    the exponent's last place: of a word's four pairs two need no shift, and two the same. `once`: $9 and $10 are the
    factors of the two places, scale and all, and $11 is what is to be added then, exact but for the scale; else $9 is
    added to codes of the same factors without the scale, which is $10."""
    kind, low, high = ("f16x2", 0x78007800, 0x68006800) if is_half else ("bf16x2", 0x7F007F00, 0x7D007D00)
    text = "{ .reg .b32 w, y, low, high; "
    text += "mov.b32 low, $9; mov.b32 high, $10; " if once else f"mov.b32 low, {low:#x}; mov.b32 high, {high:#x}; "
    for pair in range(4):
        text += "" if pair % 2 else "shr.b32 w, $8, 8; " if pair else "mov.b32 w, $8; "
        text += f"and.b32 y, w, {0x00F000F0 if pair % 2 else 0x000F000F:#x}; "
        text += f"fma.rn.{kind} y, y, {'high' if pair % 2 else 'low'}, {'$11' if once else '$9'}; "
        text += "" if once else f"mul.rn.{kind} y, y, $10; "
        text += f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, y; "
    return text + "}"


@gluon.constexpr_function
def _floats(is_half, scaled):
    """The bits of e2m1 in place as a float's least exponents, times what these are too small by: exact. `scaled`: and
    times $10; of bfloat16 both are one factor, $9."""
    kind, place, factor = ("f16x2", 9, 0x74007400) if is_half else ("bf16x2", 6, 0x7E807E80)
    once = scaled and not is_half
    text = "{ .reg .b32 w, y, by, none; "
    text += f"mov.b32 by, {'$9' if once else hex(factor)}; mov.b32 none, 0x80008000; "
    for pair in range(4):
        left = place - 4 * pair
        text += f"shl.b32 w, $8, {left}; " if left >= 0 else f"shr.b32 w, $8, {-left}; "
        text += f"and.b32 w, w, {0x00070007 << place:#x}; "
        text += f"shl.b32 y, $8, {12 - 4 * pair}; "
        text += "lop3.b32 y, y, 0x80008000, w, 0xea; "
        text += f"fma.rn.{kind} y, y, by, none; "
        text += f"mul.rn.{kind} y, y, $10; " if scaled and not once else ""
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


@gluon.constexpr_function
def half_layout():
    """Of words [1, 64, 8] as `word_halves` leaves them, of four warps' [1, 64, 16]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 16, 0], [0, 32, 0]],
        block_bases=[],
        shape=[1, 64, 8],
    )


@gluon.jit
def negated_zeros(zero, like, KIND: gl.constexpr):
    """What `operands` adds to numbers of lines whose zeros these are (8 for none), as pairs of like's type."""
    if zero.dtype.is_floating():
        LEAST: gl.constexpr = 128.0 if like == gl.bfloat16 else 1024.0
        near = gl.minimum(gl.maximum(zero.to(gl.float32), -100.0), 100.0)
        near = gl.inline_asm_elementwise(
            "cvt.rni.f32.f32 $0, $1;", "=f,f", [near], dtype=gl.float32, is_pure=True, pack=1
        )  # fmt: skip
        bits = _pair(near + LEAST, like, -1.0)
        apart = _pair(zero.to(gl.float32) - near, like, -1.0)
    else:
        bits = zero.to(gl.int32)
        if KIND == 0:
            bits = bits | (0xC300 if like == gl.bfloat16 else 0xE400)
            bits = bits | bits << 16
        apart = bits
    return bits, apart


@gluon.jit
def operands(words, less, table_ptr, like: gl.constexpr, KIND: gl.constexpr, APART: gl.constexpr):
    """words int32 [shares, lines, 16] → what their codes stand for, unscaled, [shares, lines, 128] of type `like`; or
    half of both. less: what `negated_zeros` made of the lines' zeros, [shares, lines, 1 or 16]; APART: zeros that are
    no integers.

    All in the threads that they are in.
    """
    if KIND == 0 or KIND == 3:
        HALF: gl.constexpr = like == gl.float16
        TEXT: gl.constexpr = _integers(HALF, APART) if KIND == 0 else _floats(HALF, False)
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, less[0], less[1]],
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
    return _in_columns(a, b, c, d, e, f, g, h)


@gluon.jit
def _in_columns(a, b, c, d, e, f, g, h):
    """Of words [shares, lines, 4 n] the numbers, pair by pair → [shares, lines, 32 n]."""
    SHARES: gl.constexpr = a.shape[0]
    LINES: gl.constexpr = a.shape[1]
    EACH: gl.constexpr = a.shape[2] // 4
    # [shares, lines, words, second of a pair, 8 columns on, 16 columns on]
    y = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    y = y.reshape([SHARES, LINES, 4, EACH, 2, 2, 2]).permute([0, 1, 3, 6, 5, 2, 4])
    return y.reshape([SHARES, LINES, EACH * 32])


@gluon.constexpr_function
def _at_once(dtype, kind, zero):
    """Whether a code becomes an operand, scaled, in one step: the type has the exponents for it, and none has a zero of
    its own, of which the product with a scale would be rounded."""
    return dtype == gl.bfloat16 and (kind == 3 or (kind == 0 and not zero))


@gluon.constexpr_function
def shift(dtype, kind, zero):
    """By how much `scaled_operands` are too small: the factor."""
    return float(2**32) if _at_once(dtype, kind, zero) else 1.0


@gluon.jit
def _pair(y, like: gl.constexpr, TIMES: gl.constexpr):
    """y · TIMES twice, as like's type."""
    if like == gl.bfloat16:
        bits = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [y * TIMES], dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        bits = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [y * TIMES], dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip
    return bits


@gluon.jit
def factors(scale, zero, like: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr):
    """What `scaled_operands` wants to know of lines, of their scales and zeros [1, lines, 1]."""
    y = factor(scale)
    if KIND == 0 and _at_once(like, KIND, ZERO):
        known = (_pair(y, like, 2.0**101), _pair(y, like, 2.0**97), _pair(y, like, -(2.0**-29)))
    elif KIND == 0:
        LARGE: gl.constexpr = 2.0**6 if like == gl.bfloat16 else 2.0**9
        pair = _pair(y, like, LARGE)
        if ZERO:
            middle = zero.to(gl.float32)
        else:
            middle = gl.full(y.shape, 8.0, gl.float32, y.type.layout)
        known = (_pair(middle, like, -1 / LARGE), pair, pair)
    elif KIND == 3:
        if scale.dtype == gl.uint8 and like == gl.bfloat16:  # times 2^94; no scale is larger than 2^33
            pair = gl.minimum(scale.to(gl.int32), 160) * 0x00800080 + 94 * 0x00800080
        elif like == gl.bfloat16:
            pair = _pair(y, like, 2.0**94)
        else:
            pair = _pair(y, like, 1.0)
        known = (pair, pair, pair)
    else:
        known = (y, y, y)
    return known


@gluon.jit
def scaled_operands(words, known, table_ptr, like: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr):
    """words int32 [1, lines, 16] or half of them, and their lines' `factors` → what their codes stand for [1, lines,
    128], or half of it, but for `shift`: rounded once. All in the threads that they are in."""
    LAYOUT: gl.constexpr = words.type.layout
    first = gl.convert_layout(known[0], LAYOUT, assert_trivial=True)
    if KIND == 0 or KIND == 3:
        HALF: gl.constexpr = like == gl.float16
        second = gl.convert_layout(known[1], LAYOUT, assert_trivial=True)
        third = gl.convert_layout(known[2], LAYOUT, assert_trivial=True)
        TEXT: gl.constexpr = _integers_scaled(HALF, _at_once(like, KIND, ZERO)) if KIND == 0 else _floats(HALF, True)
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            TEXT, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r", [words, first, second, third],
            dtype=_eight(like), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a = (gl.load(table_ptr + (words & 15)) * first).to(like)
        b = (gl.load(table_ptr + (words >> 16 & 15)) * first).to(like)
        c = (gl.load(table_ptr + (words >> 4 & 15)) * first).to(like)
        d = (gl.load(table_ptr + (words >> 20 & 15)) * first).to(like)
        e = (gl.load(table_ptr + (words >> 8 & 15)) * first).to(like)
        f = (gl.load(table_ptr + (words >> 24 & 15)) * first).to(like)
        g = (gl.load(table_ptr + (words >> 12 & 15)) * first).to(like)
        h = (gl.load(table_ptr + (words >> 28 & 15)) * first).to(like)
    return _in_columns(a, b, c, d, e, f, g, h)


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


@gluon.jit
def line_scales(scale_ptr, line_at, inside, block, groups, PARTS: gl.constexpr, GROUP: gl.constexpr):
    """Scales of a block's parts, or pairs of them (`codes.by_two`), of lines whose own begin at `line_at`, to be sent
    for with the words; behind a line's last, that."""
    y = ()
    if scale_ptr.dtype.element_ty == gl.int16:
        for pair in gl.static_range(PARTS // 2):
            y += (gl.load(scale_ptr + (line_at + gl.minimum(block * (PARTS // 2) + pair, groups - 1)), inside, 0),)
    else:
        for part in gl.static_range(PARTS):
            group = gl.minimum((block * 128 + part * (128 // PARTS)) // GROUP, groups - 1)
            y += (gl.load(scale_ptr + (line_at + group), inside, 0.0),)
    return y


@gluon.jit
def line_factor(scales, PART: gl.constexpr):
    """One of `line_scales` as float32; of exponents the least is as good as 0."""
    if scales[0].dtype == gl.int16:
        bits = (scales[PART // 2].to(gl.int32) << (15 if PART % 2 else 23)) & 0x7F800000
        y = bits.to(gl.float32, bitcast=True)
    elif scales[0].dtype == gl.uint8:
        y = (scales[PART].to(gl.int32) << 23).to(gl.float32, bitcast=True)
    else:
        y = scales[PART].to(gl.float32)
    return y
