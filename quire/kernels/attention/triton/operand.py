"""What queries are multiplied as."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def query_operand(q, cache_ptr):
    """q in the type that keys and values are widened to, which is its own unless the cache has 8 bits: then float16.

    That holds every 8-bit float, and two of them become it in one instruction; bfloat16 takes several.
    """
    if cache_ptr.dtype.element_ty.primitive_bitwidth == 8:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q
