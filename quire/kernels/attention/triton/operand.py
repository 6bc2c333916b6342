"""What queries are multiplied as."""

from __future__ import annotations

import triton
import triton.language as tl

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
def softcapped(s, SOFTCAP: tl.constexpr):
    """SOFTCAP · tanh(s / SOFTCAP), in the units that s has."""
    return SOFTCAP * (2 * tl.sigmoid(s * (2 / SOFTCAP)) - 1)
