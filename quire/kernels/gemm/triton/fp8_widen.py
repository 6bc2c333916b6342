"""8-bit floats to the type that they are multiplied in."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(weight, like):
    """weight as like's type; unless it has 8 bits it is that already.

    To bfloat16 there is no instruction that is not slow: by way of float16, two at a time, and of float32.
    """
    if weight.dtype.primitive_bitwidth == 8 and like.dtype == tl.bfloat16:
        weight = weight.to(tl.float16).to(tl.float32)
    return weight.to(like.dtype)
