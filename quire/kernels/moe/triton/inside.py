"""The gate between an expert's two products."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """See `quire.kernels.moe.inside.Gate`; float32."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if SHIFT != 0:
        up += SHIFT
    if ALPHA == 1:
        gate = gate * tl.sigmoid(gate)
    else:
        gate = gate * tl.sigmoid(ALPHA * gate)
    return gate * up


@triton.jit
def squared(up):
    """relu(up)²; float32."""
    up = tl.maximum(up, 0.0)
    return up * up
