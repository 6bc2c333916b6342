"""The softmax of one tile of scores after the other, as `prefill_sm90` goes through them, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gemm.triton.pipeline_sm90 import halves

PARTS = gl.constexpr(8)  # columns that one matrix instruction's results are dealt to threads by
# Weights stay relative to a score that was once the largest until one is larger by this, in units of log 2. They are
# then up to 256, which costs no precision, and few tiles have to shrink what was summed before (FlashAttention-4).
SLACK = gl.constexpr(8.0)


@gluon.constexpr_function
def _halvings(width, parts):
    return (width // parts).bit_length() - 1


@gluon.jit
def fold(x, SUM: gl.constexpr):
    """Sums or maxima of columns c, c + PARTS, c + 2 PARTS … of x, which one thread has: by halves, so that there is
    something to do while a result is on its way."""
    TIMES: gl.constexpr = _halvings(x.shape[1], PARTS)
    for _ in gl.static_range(TIMES):
        low, high = halves(x)
        if SUM:
            x = low + high
        else:
            x = gl.maximum(low, high)
    return x


@gluon.constexpr_function
def _rescaling(width):
    """Assembly, and its constraints, for `rescale` of what a thread has of [LINES, width]."""
    n = width // 2  # two lines, two columns of either in turn
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i % 4 // 2 * 2}; " for i in range(n))
    text = (
        "{ .reg .pred some, other; "
        f"setp.neu.f32 some, ${2 * n}, 0f3F800000; setp.neu.f32 other, ${2 * n + 2}, 0f3F800000; "
        "or.pred some, some, other; vote.sync.any.pred some, some, 0xffffffff; "
        f"@!some bra.uni kept; {products} kept: }}"
    )
    return text, ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescale(acc, shrink):
    """acc * shrink[:, None], unless all of a warp's lines shrink by 1, as nearly all do after their first tiles."""
    ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    RESCALING: gl.constexpr = _rescaling(acc.shape[1])
    factor = gl.convert_layout(shrink, ROW)[:, None].broadcast_to(acc.shape)
    return gl.inline_asm_elementwise(
        RESCALING[0], RESCALING[1], [acc, factor], dtype=gl.float32, is_pure=True, pack=acc.shape[1] // 2
    )


@gluon.jit
def softmax(
    s, top, total, start, query_position, seq_len, scale, masked,
    WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Weights of one tile relative to new tops, and what those relative to the old ones shrink by; scores in units of
    log 2. top: a line's largest score, or one that is less by no more than SLACK.

    total: the weights' sums, [lines, 8], a line's in as many parts as `fold` leaves.
    """
    if masked:
        position = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s.type.layout))
        rest = seq_len % PAGE
        whole = seq_len - rest
        shifted = position - (PAGE - rest)  # of the last page's tokens
        position = gl.where(position < whole, position, gl.where(shifted < whole, 1 << 30, shifted))
        seen = position[None, :] <= query_position[:, None]
        if WINDOW > 0:
            seen = seen & (position[None, :] > query_position[:, None] - WINDOW)
        s = gl.where(seen, s, float("-inf"))
    peak = gl.convert_layout(gl.max(fold(s, False), axis=1), top.type.layout)
    peak = peak * scale
    new_top = gl.where(peak > top + SLACK, peak, top)
    p = gl.exp2(s * scale - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    part = gl.convert_layout(fold(p, True), total.type.layout)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + part
    return p, new_top, total, shrink
