"""Codes of 8 bits to operands of the matrix units, in Gluon: by two, as they lie in memory, to pairs of 16 bits.

A byte without a sign, in a bfloat16's low half, is as many of its least steps (2^-133): the upper bit is the exponent's
last place. The bits of e4m3 in place are a bfloat16 with least exponents, 2^120 too small.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gemm.triton.code_words import _pair, factor


@gluon.constexpr_function
def _integers(is_half, zero):
    """Two bytes $2 in pairs' low halves; $3 is a factor, scale and all, and $4 is added then, exact but for the scale.
    With a `zero` $4 is added to codes, and $3 is their factor."""
    kind = "f16x2" if is_half else "bf16x2"
    text = "{ .reg .b32 y, t, less; cvt.u32.u16 y, $2; "
    text += f"prmt.b32 y, y, {0x64 if is_half else 0:#x}, 0x4140; xor.b32 y, y, 0x00800080; "
    if is_half:  # 1024 + byte
        text += "mov.b32 t, 0x3C003C00; mov.b32 less, 0xE480E480; fma.rn.f16x2 y, y, t, less; "
    elif zero:  # by 2^120 and 2^13
        text += "mov.b32 t, 0x7B807B80; mul.rn.bf16x2 y, y, t; "
        text += "mov.b32 t, 0x46004600; mov.b32 less, 0xC300C300; fma.rn.bf16x2 y, y, t, less; "
    if zero:
        text += f"add.rn.{kind} y, y, $4; mul.rn.{kind} y, y, $3; "
    else:
        text += "mul.rn.f16x2 y, y, $3; " if is_half else "fma.rn.bf16x2 y, y, $3, $4; "
    return text + "mov.b32 {$0, $1}, y; }"


@gluon.constexpr_function
def _floats(is_half):
    """Two bytes $2, times $3."""
    text = "{ .reg .b32 w, y, sign; cvt.u32.u16 w, $2; mov.b32 sign, 0x80008000; prmt.b32 w, w, 0, 0x1404; "
    text += f"and.b32 y, w, 0x7F007F00; shr.b32 y, y, {1 if is_half else 4}; lop3.b32 y, w, sign, y, 0xea; "
    return text + f"mul.rn.{'f16x2' if is_half else 'bf16x2'} y, y, $3; mov.b32 {{$0, $1}}, y; }}"


@gluon.constexpr_function
def _two(dtype):
    return (dtype, dtype)


@gluon.constexpr_function
def byte_shift(dtype, kind, zero):
    """By how much `byte_operands` are too small: the factor."""
    if dtype != gl.bfloat16:
        return 1.0
    return float(2**20) if kind == 2 else 1.0 if zero else float(2**32)


@gluon.constexpr_function
def pairs_layout():
    """Of pairs [64, 32] as the matrix units want them from four warps."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )


@gluon.jit
def byte_factors(scale, zero, like: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr):
    """What `byte_operands` wants to know of groups' scales and zeros, in pairs."""
    y = factor(scale)
    if KIND == 2:
        FLOATS: gl.constexpr = 2.0**100 if like == gl.bfloat16 else 2.0**8
        by = _pair(y, like, FLOATS)
        known = (by, by)
    elif ZERO:
        known = (_pair(y, like, 1.0), _pair(zero.to(gl.float32), like, -1.0))
    elif like == gl.bfloat16:
        known = (_pair(y, like, 2.0**101), _pair(y, like, -(2.0**-25)))
    else:
        by = _pair(y, like, 1.0)
        known = (by, by)
    return known


@gluon.jit
def byte_operands(pairs, known, like: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr):
    """pairs int16 [64, 32], two columns each, and `byte_factors` [64, parts, 1] of as many equal parts of the columns →
    what the bytes stand for [64, 64], but for `byte_shift`."""
    LINES: gl.constexpr = pairs.shape[0]
    PAIRS: gl.constexpr = pairs.shape[1]
    PARTS: gl.constexpr = known[0].shape[1]
    HALF: gl.constexpr = like == gl.float16
    TEXT: gl.constexpr = _integers(HALF, ZERO) if KIND == 1 else _floats(HALF)
    a, b = gl.inline_asm_elementwise(
        TEXT, "=h,=h,h,r,r", [pairs.reshape([LINES, PARTS, PAIRS // PARTS]), known[0], known[1]], dtype=_two(like),
        is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(a, b).reshape([LINES, 2 * PAIRS])
