"""Codes of 4 and 8 bits (`kernels/gemm/codes.py`) in registers: to the type that they are multiplied in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gemm.codes import BLOCK, NIBBLES, WORD, Codes, table

KINDS = {"int4": 0, "int8": 1, "e4m3": 2, "e2m1": 3, "nf4": 4, "fp4": 4}


@triton.jit
def decoded(codes, table_ptr, like, KIND: tl.constexpr):
    """Of a block of columns [n, bytes] the values [n, columns] in their order, as like's type; of int4 from 0 on."""
    if KIND == 1 or KIND == 2:
        y = values(codes, table_ptr, like, KIND)
    else:
        N: tl.constexpr = codes.shape[0]
        low, high = values(codes & 15, table_ptr, like, KIND), values(codes >> 4, table_ptr, like, KIND)
        # Bytes are in order of d, a, e and b, columns of a, b, c, d and e: see `kernels/gemm/codes.py`.
        y = tl.reshape(tl.join(low, high), [N, 4, 4, 2, 2, 2])
        y = tl.reshape(tl.permute(y, (0, 2, 4, 5, 1, 3)), [N, 128])
    return y


@triton.jit
def values(codes, table_ptr, like, KIND: tl.constexpr):
    """Conversions of integers are slow on a GPU: bits are put behind those of a float whose last place counts ones."""
    if KIND == 0:
        if like.dtype == tl.bfloat16:
            y = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
        else:
            y = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    elif KIND == 1:
        shifted = (codes.to(tl.uint8, bitcast=True) ^ 128).to(tl.uint16)
        y = ((shifted | 0x6400).to(tl.float16, bitcast=True) - 1152.0).to(tl.float32)
    elif KIND == 2:
        y = codes.to(tl.float16).to(tl.float32)
    elif KIND == 3:
        bits = ((codes & 7).to(tl.uint16) << 9) | ((codes & 8).to(tl.uint16) << 12)
        y = bits.to(tl.float16, bitcast=True) * 16384.0
    else:
        y = tl.load(table_ptr + codes.to(tl.int32))
    return y.to(like.dtype)


@triton.jit
def scaled_by(scale):
    """A scale as float32; of 8 bits without a sign it is an exponent."""
    if scale.dtype == tl.uint8:
        bits = tl.maximum(scale.to(tl.int32) << 23, 1 << 22)
        y = bits.to(tl.float32, bitcast=True)
    else:
        y = scale.to(tl.float32)
    return y


@triton.jit
def centred(y, zero_ptr, at, inside, ZERO: tl.constexpr, KIND: tl.constexpr):
    """y less the zeros at `at`, in float32 where these are no integers; those of int4 without any is 8."""
    if ZERO:
        zero = tl.load(zero_ptr + at, inside, 0.0)
        if zero.dtype.is_floating():
            y = y.to(tl.float32) - zero.to(tl.float32)
        else:
            y = (y - zero.to(tl.float32).to(y.dtype)).to(y.dtype)
    elif KIND == 0:
        y = (y - 8.0).to(y.dtype)
    return y


def is_taken(weight: Codes) -> bool:
    """Whether every kernel multiplies by it: whole blocks of columns, and groups that do not cross them."""
    return weight.columns % BLOCK == 0 and _fits(weight)


def has_words(weight: Codes) -> bool:
    """Whether those do that know rows whose last block has fewer words a thread."""
    return weight.kind in NIBBLES and weight.columns % WORD == 0 and _fits(weight)


def _fits(weight: Codes) -> bool:
    return BLOCK % weight.group == 0 or weight.group % BLOCK == 0


def tail_of(weight: Codes) -> int:
    """Words of a thread in a row's last block, where that is not whole."""
    return weight.columns % BLOCK // WORD if weight.kind in NIBBLES else 0


def arguments(weight: Codes) -> tuple[torch.Tensor, ...]:
    """Pointers: codes, scale, zero, outer, table."""
    codes = weight.codes
    values = _table(weight.kind, codes.device) if KINDS[weight.kind] == 4 else codes
    return (
        codes,
        weight.scale,
        codes if weight.zero is None else weight.zero,
        codes if weight.outer is None else weight.outer,
        values,
    )


def by_two(weight: Codes) -> torch.Tensor:
    """Its scales; exponents of 8 bits of each 32 columns as pairs, int16, where a line has an even number of them: half
    as many loads, which count for as much as those of the codes where each touches as many lines."""
    scale = weight.scale
    pairs = scale.dtype == torch.uint8 and weight.group == WORD and scale.shape[-1] % 2 == 0
    return scale.view(torch.int16) if pairs and weight.kind in NIBBLES else scale


_tables: dict[tuple[str, torch.device], torch.Tensor] = {}


def _table(kind: str, device: torch.device) -> torch.Tensor:
    """Made once: graphs want it where it was."""
    if (kind, device) not in _tables:
        _tables[kind, device] = table(kind, device)  # type: ignore[arg-type]
    return _tables[kind, device]


def constants(weight: Codes) -> dict[str, int | bool]:
    """Of the kernels, for this kind of weight."""
    return {
        "KIND": KINDS[weight.kind], "NIBBLES": weight.kind in NIBBLES, "GROUP": weight.group,
        "ZERO": weight.zero is not None, "OUTER": weight.outer is not None,
    }  # fmt: skip
