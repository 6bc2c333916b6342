"""The gate between an expert's two products, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def gated(gate, up, ALPHA: gl.constexpr, LIMIT: gl.constexpr, SHIFT: gl.constexpr):
    """See `quire.kernels.moe.inside.Gate`; float32."""
    if LIMIT > 0:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    if SHIFT != 0:
        up += SHIFT
    return gate / (1.0 + gl.exp(-ALPHA * gate)) * up


@gluon.jit
def squared(up):
    """relu(up)²; float32."""
    up = gl.maximum(up, 0.0)
    return up * up
