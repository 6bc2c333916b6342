"""Blocks of GGUF files (ggml): what the bytes of each type stand for. Plain torch, on any device.

A row is a line of blocks, each with scales of its own. A type is decoded into whole numbers of 4 or 8 bits, the scale
of each group of columns and what is taken from them, so that `numbers * scale - offset` is what the row stands for, in
float32 the very number that ggml gives. Types of code books (IQ1 … IQ3, ternary ones) are widened by ggml's own Python
library. Format: https://github.com/ggml-org/ggml (block_q4_K and its kin)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.foundation.errors import WeightsError
from quire.foundation.gguf_header import TYPES
from quire.kernels.gemm.codes import Kind, table

SIZES = {kind.name: kind for kind in TYPES.values()}
# Values of 4-bit codes that are no numbers in a row ("non-linear").
_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Decoded(NamedTuple):
    """Of blocks [b, …]. numbers [b, columns of a block]: int8, or uint8 codes of `kind` where they fit 4 bits.

    scale, offset: float32 [b, groups of a block]; scale of e2m1: uint8, exponents; offset None: nothing is taken."""

    kind: Kind
    numbers: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None


class Layout(NamedTuple):
    """How a type is kept. group: columns that share a scale."""

    kind: Kind
    group: int
    has_offset: bool
    decode: Callable[[torch.Tensor], Decoded]


def _half(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [b, 2] → float32 [b, 1]."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [b, n] → [b, 2n]: all low halves, then the high ones."""
    return torch.cat([raw & 15, raw >> 4], dim=1)


def _bits(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [b, n] → [b, 8n] of one bit each, the lowest of a byte first."""
    shifts = torch.arange(8, device=raw.device, dtype=torch.uint8)
    return ((raw[..., None] >> shifts) & 1).flatten(1)


def _planes(raw: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """uint8 [b, n] → [b, n · 8 / bits]: of each `run` bytes the lowest `bits` of all, then the next ones."""
    shifts = torch.arange(0, 8, bits, device=raw.device, dtype=torch.uint8)
    return ((raw.view(len(raw), -1, 1, run) >> shifts[:, None]) & ((1 << bits) - 1)).flatten(1)


def _signed(raw: torch.Tensor) -> torch.Tensor:
    return raw.contiguous().view(torch.int8)


def _q4_0(raw: torch.Tensor) -> Decoded:
    return Decoded("int4", _nibbles(raw[:, 2:]), _half(raw[:, :2]))


def _q4_1(raw: torch.Tensor) -> Decoded:
    return Decoded("int4", _nibbles(raw[:, 4:]), _half(raw[:, :2]), -_half(raw[:, 2:4]))


def _q5_0(raw: torch.Tensor) -> Decoded:
    numbers = _nibbles(raw[:, 6:]) | _bits(raw[:, 2:6]) << 4
    return Decoded("int8", (numbers.int() - 16).to(torch.int8), _half(raw[:, :2]))


def _q5_1(raw: torch.Tensor) -> Decoded:
    numbers = _nibbles(raw[:, 8:]) | _bits(raw[:, 4:8]) << 4
    return Decoded("int8", numbers.to(torch.int8), _half(raw[:, :2]), -_half(raw[:, 2:4]))


def _q8_0(raw: torch.Tensor) -> Decoded:
    return Decoded("int8", _signed(raw[:, 2:]), _half(raw[:, :2]))


def _q2_k(raw: torch.Tensor) -> Decoded:
    scales, d, least = raw[:, :16], _half(raw[:, 80:82]), _half(raw[:, 82:84])
    return Decoded("int4", _planes(raw[:, 16:80], 2, 32), d * (scales & 15).float(), least * (scales >> 4).float())


def _q3_k(raw: torch.Tensor) -> Decoded:
    """Scales of 6 bits: the low 4 by halves of 8 bytes, the high 2 by quarters of 4."""
    high, low, packed, d = raw[:, :32], raw[:, 32:96], raw[:, 96:108], _half(raw[:, 108:110])
    scales = _nibbles(packed[:, :8]) | _planes(packed[:, 8:], 2, 4) << 4
    missing = _planes(high, 1, 32) ^ 1
    numbers = _planes(low, 2, 32).int() - 4 * missing.int()
    return Decoded("int4", (numbers + 8).to(torch.uint8), d * (scales.int() - 32).float())


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and least values of 8 groups [b, 8] each, out of 12 bytes."""
    scale, least, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([scale & 63, (both & 15) | (scale >> 6) << 4], dim=1)
    return scales.float(), torch.cat([least & 63, (both >> 4) | (least >> 6) << 4], dim=1).float()


def _q4_k(raw: torch.Tensor) -> Decoded:
    scale, least = _six_bits(raw[:, 4:16])
    return Decoded("int4", _planes(raw[:, 16:], 4, 32), _half(raw[:, :2]) * scale, _half(raw[:, 2:4]) * least)


def _q5_k(raw: torch.Tensor) -> Decoded:
    scale, least = _six_bits(raw[:, 4:16])
    numbers = _planes(raw[:, 48:], 4, 32) | _planes(raw[:, 16:48], 1, 32) << 4
    return Decoded("int8", numbers.to(torch.int8), _half(raw[:, :2]) * scale, _half(raw[:, 2:4]) * least)


def _q6_k(raw: torch.Tensor) -> Decoded:
    numbers = _planes(raw[:, :128], 4, 64) | _planes(raw[:, 128:192], 2, 32) << 4
    scale = _half(raw[:, 208:210]) * _signed(raw[:, 192:208]).float()
    return Decoded("int8", (numbers.int() - 32).to(torch.int8), scale)


def _of_table(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_NL, dtype=torch.int8, device=codes.device)[codes.int()]


def _iq4_nl(raw: torch.Tensor) -> Decoded:
    return Decoded("int8", _of_table(_nibbles(raw[:, 2:])), _half(raw[:, :2]))


def _iq4_xs(raw: torch.Tensor) -> Decoded:
    shifts = torch.arange(0, 8, 2, device=raw.device, dtype=torch.uint8)
    high = ((raw[:, 2:4, None] >> shifts) & 3).flatten(1)
    low = torch.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], dim=-1).flatten(1)
    scale = _half(raw[:, :2]) * ((low | high << 4).int() - 32).float()
    return Decoded("int8", _of_table(_planes(raw[:, 8:], 4, 16)), scale)


def _mxfp4(raw: torch.Tensor) -> Decoded:
    return Decoded("e2m1", _nibbles(raw[:, 1:]), raw[:, :1])


BLOCKS: dict[str, Layout] = {
    "Q4_0": Layout("int4", 32, has_offset=False, decode=_q4_0),
    "Q4_1": Layout("int4", 32, has_offset=True, decode=_q4_1),
    "Q5_0": Layout("int8", 32, has_offset=False, decode=_q5_0),
    "Q5_1": Layout("int8", 32, has_offset=True, decode=_q5_1),
    "Q8_0": Layout("int8", 32, has_offset=False, decode=_q8_0),
    "Q2_K": Layout("int4", 16, has_offset=True, decode=_q2_k),
    "Q3_K": Layout("int4", 16, has_offset=False, decode=_q3_k),
    "Q4_K": Layout("int4", 32, has_offset=True, decode=_q4_k),
    "Q5_K": Layout("int8", 32, has_offset=True, decode=_q5_k),
    "Q6_K": Layout("int8", 16, has_offset=False, decode=_q6_k),
    "IQ4_NL": Layout("int8", 32, has_offset=False, decode=_iq4_nl),
    "IQ4_XS": Layout("int8", 32, has_offset=False, decode=_iq4_xs),
    "MXFP4": Layout("e2m1", 32, has_offset=False, decode=_mxfp4),
}
LIBRARY = tuple(name for name in SIZES if name not in BLOCKS and SIZES[name].numbers > 1)
"""Types that the library widens: they are kept in plain numbers."""


def decoded(raw: torch.Tensor, kind: str) -> Decoded:
    """uint8 [rows, bytes] of blocks → the same of whole rows."""
    blocks = raw.reshape(-1, SIZES[kind].num_bytes)
    found = BLOCKS[kind].decode(blocks)
    rows = len(raw)
    offset = None if found.offset is None else found.offset.reshape(rows, -1)
    return Decoded(found.kind, found.numbers.reshape(rows, -1), found.scale.reshape(rows, -1), offset)


def widened(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """uint8 [rows, bytes] of blocks → float32 [rows, columns]. Raises WeightsError without the library it needs."""
    if kind in LIBRARY:
        return _by_library(raw, kind)
    found = decoded(raw, kind)
    if found.kind == "e2m1":
        values = table("e2m1", raw.device)[found.numbers.int()]
        scale = (found.scale.int() << 23).clamp_min_(1 << 22).view(torch.float32)
    else:
        values, scale = found.numbers.float() - (8 if found.kind == "int4" and found.offset is None else 0), found.scale
    wide = values.view(*scale.shape, -1) * scale[..., None]
    if found.offset is not None:
        wide = wide - found.offset[..., None]
    return wide.flatten(1)


def _by_library(raw: torch.Tensor, kind: str) -> torch.Tensor:
    try:
        import gguf
    except ImportError:
        raise WeightsError(
            f"GGUF tensors of type {kind} are read by the package gguf, which is not there: pip install 'quire[gguf]'",
            "model",
        ) from None
    wide = gguf.quants.dequantize(raw.cpu().numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(wide).to(raw.device)
