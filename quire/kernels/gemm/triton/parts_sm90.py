"""Sums of tiles that several programs share, in Gluon: each leaves its part in a workspace and counts itself, and the
one that has the tile's last block waits for the others and adds theirs to its own, in their order.

Of a program's two consumers, four warps each, each has a part, and a counter, of its own. Who waits must wait for
programs that were launched before it, and these must leave what they do not finish first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _in_line(acc):
    """[64, rows] → [64 rows], a thread's four in a row and a warp's 128: columns by 16, and of these the first 8 lines
    of each 16 and the others."""
    SIXTEENS: gl.constexpr = acc.shape[1] // 16
    y = acc.reshape([4, 2, 8, SIXTEENS, 2, 4, 2]).permute([3, 1, 0, 2, 5, 4, 6])
    return y.reshape([acc.shape[0] * acc.shape[1]])


@gluon.jit
def _in_lines(y, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """And back, [64, rows]."""
    y = y.reshape([ROWS // 16, 2, 4, 8, 4, 2, 2]).permute([2, 1, 3, 0, 5, 4, 6]).reshape([64, ROWS])
    return gl.convert_layout(y, LAYOUT, assert_trivial=True)


@gluon.jit
def _await(counter_ptr, count):
    """Until the counter is that far; what was written before it was counted may be read then."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 v; again: ld.acquire.gpu.global.b32 v, [$1]; setp.lt.s32 p, v, $2; @p bra again; "
        "mov.b32 $0, v; }",
        "=r,l,r", [counter_ptr, count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def count(counter_ptr, most):
    """One more; after `most` there is 0. What this consumer has written is seen by those who see the count."""
    gl.thread_barrier()
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.s32 p, t, 0; "
        "@p fence.acq_rel.gpu; @p red.relaxed.gpu.global.inc.u32 [$1], $2; mov.b32 $0, t; }",
        "=r,l,r", [counter_ptr, most], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def leave(sums, partial_ptr, NUMBER: gl.constexpr):
    """Writes a part's sums to the workspace."""
    HALVES: gl.constexpr = len(sums)
    AREA: gl.constexpr = 64 * sums[0].shape[1]
    at = partial_ptr + (2 * gl.program_id(0) + NUMBER).to(gl.int64) * (HALVES * AREA)
    for half in gl.static_range(HALVES):
        y = _in_line(sums[half])
        gl.store(at + half * AREA + gl.arange(0, AREA, y.type.layout), y)


@gluon.jit
def collected(sums, partial_ptr, counter_ptr, first, ROWS: gl.constexpr, NUMBER: gl.constexpr):
    """The sums of a tile whose other parts the programs from `first` on have left."""
    HALVES: gl.constexpr = len(sums)
    AREA: gl.constexpr = 64 * ROWS
    SUMS: gl.constexpr = sums[0].type.layout
    others = gl.program_id(0) - first
    _await(counter_ptr, others)
    count(counter_ptr, others)
    at = partial_ptr + (2 * first + NUMBER).to(gl.int64) * (HALVES * AREA)
    found = ()
    for half in gl.static_range(HALVES):
        y = _in_line(sums[half])
        place = at + half * AREA + gl.arange(0, AREA, y.type.layout)
        for _ in range(others):
            y += gl.load(place, cache_modifier=".cg")
            place += 2 * HALVES * AREA
        found += (_in_lines(y, ROWS, SUMS),)
    return found
