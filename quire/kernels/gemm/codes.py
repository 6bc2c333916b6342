"""Numbers of 4 and 8 bits that share scales by groups of columns: how they are kept, what they stand for, and the
nearest ones to given numbers. Plain torch, on any device.

A matrix [n, k] is `(value(code) - zero) * scale`, scale and zero being those of the row's group of `group` columns, and
times `outer`, one of each row, where a format has it. Codes of 4 bits are packed by two, every 128 columns among
themselves, in the order in which the matrix units of a GPU want them. With column 32 a + 16 b + 8 c + 2 d + e (a, d
below 4, the others below 2) at place c, the lower half first, of byte 16 d + 4 a + 2 e + b, four threads (d) have 16
bytes in a row each; a word (a) of these holds the thread's numbers of two matrix instructions (b), and of each two
pairs (c) of neighbours (e), one in the word's low half and one in its high half. Fewer columns at the end have as many
words less a thread (a below 3, 2 or 1), and what is less than a word's 32 is packed by halves: the first in the bytes'
low halves.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Kind = Literal["int4", "int8", "e4m3", "e2m1", "nf4", "fp4"]
"""int4: 0 … 15, without a zero of their own 8 stands for 0. int8: -128 … 127. e4m3, e2m1: floats of so many bits of
exponent and mantissa. nf4, fp4: tables of 16 values."""

BLOCK = 128  # columns whose codes of 4 bits are packed together
HALF = BLOCK // 2
WORD = 32  # of these, that each of four threads has 8 of
_COLUMNS, _EIGHT = (2, 2, 4, 2), 4  # b, c, d and e behind rows, blocks and a, and where c is
_BYTES = (0, 1, 4, 2, 5, 3)  # rows, blocks and a, b, d, e → d, a, e, b
_PLACES = (0, 1, 3, 5, 2, 4)  # and back
NIBBLES = ("int4", "e2m1", "nf4", "fp4")
E4M3_LARGEST, E2M1_LARGEST = 448.0, 6.0
LEAST = 1e-30  # a group of zeros has some scale

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# NormalFloat (Dettmers et al., 2023): quantiles of the normal distribution between -1 and 1.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0052083333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25)
TABLES: dict[str, tuple[float, ...]] = {
    "e2m1": (*_E2M1, *(-value for value in _E2M1)),
    "nf4": _NF4,
    "fp4": (*_FP4, *(-value for value in _FP4)),
}


class Codes(NamedTuple):
    """A matrix [n, k] in codes.

    codes: uint8 [n, k / 2] of two each, or [n, k] of int8 or e4m3. scale: [n, groups] of any float type,
    or uint8: exponents, 2^(scale - 127). zero: [n, groups], of int4 uint8, of int8 int8, or any float type. outer:
    float32 [n].
    """

    kind: Kind
    group: int  # columns; the last one may have fewer
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    outer: torch.Tensor | None = None

    def of(self, rows: slice) -> Codes:
        """Some of its rows."""
        zero, outer = (None if tensor is None else tensor[rows] for tensor in (self.zero, self.outer))
        return Codes(self.kind, self.group, self.codes[rows], self.scale[rows], zero, outer)

    @property
    def columns(self) -> int:
        return self.codes.shape[-1] * (2 if self.kind in NIBBLES else 1)


def bytes_of(kind: Kind, columns: int) -> int:
    """That a row's codes take."""
    return -(-columns // 2) if kind in NIBBLES else columns


def _runs(columns: int) -> list[tuple[int, int, int]]:
    """Where columns begin and end whose threads have as many words each: the whole blocks, and what follows them."""
    whole, words = columns // BLOCK * BLOCK, columns // WORD * WORD
    runs = ((0, whole, BLOCK // WORD), (whole, words, (words - whole) // WORD))
    return [run for run in runs if run[0] < run[1]]


def packed(codes: torch.Tensor) -> torch.Tensor:
    """codes uint8 [n, k] below 16, k even → two a byte, [n, k / 2]."""
    parts = []
    for first, end, words in _runs(codes.shape[1]):
        low, high = codes[:, first:end].reshape(len(codes), -1, words, *_COLUMNS).unbind(_EIGHT)
        parts.append((low | high << 4).permute(_BYTES).flatten(1))
    low, high = codes[:, codes.shape[1] // WORD * WORD :].reshape(len(codes), 2, -1).unbind(1)
    return torch.cat([*parts, low | high << 4], dim=1)


def unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """The same back, uint8 [n, k]."""
    parts, columns = [], 2 * pairs.shape[1]
    for first, end, words in _runs(columns):
        places = pairs[:, first // 2 : end // 2].reshape(len(pairs), -1, 4, words, 2, 2).permute(_PLACES)
        parts.append(torch.stack([places & 15, places >> 4], dim=_EIGHT).flatten(1))
    rest = pairs[:, columns // WORD * WORD // 2 :]
    return torch.cat([*parts, rest & 15, rest >> 4], dim=1)


def widened(of: Codes, dtype: torch.dtype) -> torch.Tensor:
    """What the codes stand for [n, k], computed in float32 and rounded once."""
    values = _values(of)
    scale = _powers(of.scale) if of.scale.dtype == torch.uint8 else of.scale
    by_group = torch.nn.functional.pad(values, (0, -of.columns % of.group)).view(len(values), -1, of.group)
    if of.zero is not None:
        by_group = by_group - of.zero.float()[..., None]
    elif of.kind == "int4":
        by_group = by_group - 8
    wide = (by_group * scale.float()[..., None]).view(len(values), -1)[:, : of.columns]
    return (wide if of.outer is None else wide * of.outer[:, None]).to(dtype)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """2^(exponents - 127), float32, put together from bits; the least one has no leading one."""
    return (exponents.int() << 23).clamp_min_(1 << 22).view(torch.float32)


def _values(of: Codes) -> torch.Tensor:
    if of.kind not in NIBBLES:
        return of.codes.float()
    codes = unpacked(of.codes)
    return (
        codes.float()
        if of.kind == "int4"
        else table(of.kind, codes.device).index_select(0, codes.flatten().int()).view(codes.shape)
    )


def table(kind: Kind, device: torch.device) -> torch.Tensor:
    """The 16 values of a kind that has them, float32."""
    return torch.tensor(TABLES[kind], dtype=torch.float32, device=device)


# -- the nearest codes ------------------------------------------------------------------------------------------


class Nearest(NamedTuple):
    """Codes of each number [n, k], unpacked, and what they are to be multiplied by."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    outer: torch.Tensor | None = None


def nearest(
    dense: torch.Tensor, kind: Kind, group: int, scale_dtype: torch.dtype, zero_dtype: torch.dtype | None, outer: bool
) -> Nearest:
    """To dense [n, k], round to nearest, each group by itself; with scales as they will be kept."""
    n, k = dense.shape
    wide = torch.nn.functional.pad(dense.float(), (0, -k % group)).view(n, -1, group)
    if zero_dtype is not None:
        codes, scale, zero = _between(wide, kind, scale_dtype, zero_dtype)
        return Nearest(codes.view(n, -1)[:, :k], scale, zero)
    whole = None
    if outer:
        whole = wide.abs().amax((1, 2)).div_(_largest(kind) * E4M3_LARGEST).clamp_min_(LEAST)
        wide = wide / whole[:, None, None]
    scale, as_float = _scale(wide, kind, scale_dtype)
    codes = _rounded(wide / _divisor(as_float)[..., None], kind)
    return Nearest(codes.view(n, -1)[:, :k], scale, None, whole)


def _largest(kind: Kind) -> float:
    return {"int4": 8.0, "int8": 127.0, "e4m3": E4M3_LARGEST, "e2m1": E2M1_LARGEST}.get(kind, 1.0)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, LEAST, scale)


def _scale(wide: torch.Tensor, kind: Kind, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each group, as kept and in float32. Of int4 the largest number becomes -8, the scale having its sign: 16
    values instead of 15."""
    low, high = wide.amin(-1), wide.amax(-1)
    largest = torch.maximum(-low, high)
    if dtype == torch.uint8:  # the least power of two that holds the largest
        exponent = torch.log2((largest / _largest(kind)).clamp_min(LEAST)).ceil().clamp(-127, 127)
        return (exponent + 127).to(torch.uint8), torch.exp2(exponent)
    scale = (torch.where(-low >= high, -low, -high) if kind == "int4" else largest) / _largest(kind)
    if dtype == torch.float8_e4m3fn:
        scale = scale.clamp(max=E4M3_LARGEST)
    elif dtype == torch.float16:
        scale = scale.clamp(-65504, 65504)
    kept = torch.where(scale.abs() < LEAST, LEAST, scale).to(dtype)
    return kept, kept.float()


def _rounded(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """To codes, of values between the largest of the kind."""
    if kind == "int4":
        return values.round().add_(8).clamp_(0, 15).to(torch.uint8)
    if kind == "int8":
        return values.round().clamp_(-127, 127).to(torch.int8)
    if kind == "e4m3":
        return values.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    known, order = table(kind, values.device).sort(stable=True)
    return order[torch.bucketize(values, (known[1:] + known[:-1]) / 2)].to(torch.uint8)


def _between(
    wide: torch.Tensor, kind: Kind, scale_dtype: torch.dtype, zero_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of integers from the least number to the largest, and 0 among them; scale and zero."""
    least, most = (0, 15) if kind == "int4" else (-128, 127)
    low, high = wide.amin(-1).clamp_max(0), wide.amax(-1).clamp_min(0)
    scale = ((high - low) / (most - least)).clamp_min(LEAST).to(scale_dtype)
    step = _divisor(scale.float())
    zero = (least - low / step).clamp(least, most).round().to(zero_dtype)
    codes = (wide / step[..., None]).round_().add_(zero.float()[..., None]).clamp_(least, most)
    return codes.to(torch.uint8 if kind == "int4" else torch.int8), scale, zero
