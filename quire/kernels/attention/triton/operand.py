"""What queries are multiplied as."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from quire.kernels.attention.scores import PerHead, Scores

LOG2_E = 1.4426950408889634


def cap(softcap: float) -> float:
    """A soft cap in units of log 2, as kernels have scores; 0: none."""
    return softcap * LOG2_E


@triton.jit
def query_operand(q, cache_ptr):
    """q in the type that keys and values are widened to, which is its own unless the cache has 8 bits: then float16.

    That holds every 8-bit float, and two of them become it in one instruction; bfloat16 takes several.
    """
    if cache_ptr.dtype.element_ty.primitive_bitwidth == 8:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


@triton.jit
def float8_pairs(words, E5M2: tl.constexpr):
    """16-bit words that hold two 8-bit floats → the low ones and the high ones as float16, on a device that turns two
    into float16 in one instruction.

    Values go through the matrix units transposed, which shared memory does for 16 bits, not for 8: as words they are
    read by it sixteen at a time, not each alone.
    """
    KIND: tl.constexpr = "e5m2" if E5M2 else "e4m3"
    CODE: tl.constexpr = (
        "{.reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t; cvt.rn.f16x2."
        + KIND + "x2 $0, l; cvt.rn.f16x2." + KIND + "x2 $1, h;}"
    )  # fmt: skip
    return tl.inline_asm_elementwise(CODE, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def softcapped(s, SOFTCAP: tl.constexpr):
    """SOFTCAP · tanh(s / SOFTCAP), in the units that s has."""
    return SOFTCAP * (2 * tl.sigmoid(s * (2 / SOFTCAP)) - 1)


@triton.jit
def in_log2(x):
    """In units of log 2."""
    return x * 1.4426950408889634


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first token that the query at `position` sees, of a window or of its chunk."""
    if CHUNKED:
        first = position // WINDOW * WINDOW
    else:
        first = tl.maximum(position + 1 - WINDOW, 0)
    return first


def pointers(scores: Scores, heads: PerHead, absent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sinks and slopes of a layer's heads as kernels take them. absent: what nothing is read from."""
    sinks, slopes = heads
    if scores.sinks != (sinks is not None) or scores.slopes != (slopes is not None):
        raise ValueError(f"{scores} and what the heads bring do not go together")
    return absent if sinks is None else sinks, absent if slopes is None else slopes
