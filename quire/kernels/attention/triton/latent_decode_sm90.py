"""Decode attention over latent rows for compute capability 9.0, in Gluon.

A block of threads stays on its processor and works through its pieces of the step (`latent_schedule`): some tiles of
TOKENS consecutive tokens of one row, and 64 of the heads, its lines. Its warps have roles. The producer, one warp,
keeps the bulk copy engine busy: a tile comes page by page into one of two places in shared memory, its latent columns
in two halves. It is read there three times: as keys of all columns, and each half as values.

The two consumers, four warps each, have a place each, and so every other tile: its scores. Each also has a half of the
values' columns, for all tiles. Who has made weights of a tile's scores hands them to the other one through shared
memory, with the tops they are relative to; then both multiply, each with its half, whose place is free after that. So
no score is computed twice, and the sums of 64 lines by 512 columns, half of a processor's registers, never move.

A row's last page is rarely full, and what lies past the row's end may be anything, NaN included. So that page is copied
from a line before its own first: its tokens end where the page does, and before them are the zeros that the copy engine
gives for what lies outside. The mask knows.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.attention.latent_rows import LatentRows
from quire.kernels.attention.triton.latent_schedule import ITEM
from quire.kernels.attention.triton.operand import LOG2_E
from quire.kernels.attention.triton.prefill_softmax_sm90 import PARTS, SLACK, fold, rescale
from quire.kernels.gemm.triton.pipeline_sm90 import follow
from quire.kernels.triton.launch import num_processors

RANK, ROPE, PAGE = 512, 64, 16  # of the caches that it was made for, and where it was measured
LINES = 64  # of a block: what four warps' matrix instructions take
TOKENS = 64  # of a tile: two of them, the queries and the weights fill shared memory
MIN_TILES = 2  # of a program
SWIZZLED, PAGED = (gl.NVMMASharedLayout(128, 16, rank) for rank in (2, 3))
PART = gl.constexpr(64)  # columns that come at once: the swizzle's width, 128 bytes


@gluon.jit
def _piece(items_ptr, number):
    """Row, seat, first token, end, whether the next piece is this block's too, pieces of the row."""
    at = items_ptr + number * ITEM
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5)


@gluon.jit
def _nothing():
    """0, which the compiler does not know: what follows from it stays in the loop. Or it would keep the descriptors of
    all matrix instructions in registers, more than there are."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _bring(
    cache_desc, pages, ropes, full, empty, place, parity, table, token, end,
    RANK: gl.constexpr, ROPE: gl.constexpr, PAGE: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the tile at `token` into a place, each half once that is free."""
    PAGES: gl.constexpr = TOKENS // PAGE
    PARTS_OF_HALF: gl.constexpr = RANK // 2 // PART
    ROPE_PARTS: gl.constexpr = ROPE // PART
    last = gl.maximum(end - 1, 0) // PAGE
    blocks = ()
    lines = ()
    for i in gl.static_range(PAGES):
        page = gl.minimum(token // PAGE + i, last)
        blocks += (gl.load(table + page),)
        lines += (gl.minimum(end - token - (i + 1) * PAGE, 0),)
    for half in gl.static_range(2):
        mbarrier.wait(empty.index(2 * place + half), parity ^ 1)
        ready = full.index(2 * place + half)
        mbarrier.expect(ready, TOKENS * (RANK // 2 + (ROPE if half == 0 else 0)) * 2)
        if half == 0:
            for part in gl.static_range(ROPE_PARTS):
                for i in gl.static_range(PAGES):
                    tma.async_copy_global_to_shared(
                        cache_desc, [blocks[i], lines[i], RANK + part * PART], ready,
                        ropes.index((place * ROPE_PARTS + part) * PAGES + i),
                    )  # fmt: skip
        for part in gl.static_range(PARTS_OF_HALF):
            for i in gl.static_range(PAGES):
                tma.async_copy_global_to_shared(
                    cache_desc, [blocks[i], lines[i], (half * PARTS_OF_HALF + part) * PART], ready,
                    pages.index(((2 * place + half) * PARTS_OF_HALF + part) * PAGES + i),
                )  # fmt: skip


@gluon.jit
def _bring_queries(
    q_desc, q_halves, q_rope, q_full, q_empty, turn, line, RANK: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Those of a row's or the next row's lines that begin at `line`; nobody asks for the latter's results."""
    LINES: gl.constexpr = q_halves.shape[1]
    parts = q_halves._reinterpret(q_halves.dtype, [RANK // PART, LINES, PART], q_halves.layout)
    rope_parts = q_rope._reinterpret(q_rope.dtype, [ROPE // PART, LINES, PART], q_rope.layout)
    mbarrier.wait(q_empty, turn & 1 ^ 1)
    mbarrier.expect(q_full, LINES * (RANK + ROPE) * 2)
    for part in gl.static_range(ROPE // PART):
        tma.async_copy_global_to_shared(q_desc, [line, RANK + part * PART], q_full, rope_parts.index(part))
    for part in gl.static_range(RANK // PART):
        tma.async_copy_global_to_shared(q_desc, [line, part * PART], q_full, parts.index(part))


@gluon.jit
def _produce(
    q_desc, cache_desc, q_halves, q_rope, halves, ropes, full, empty, q_full, q_empty,
    items_ptr, first_item, table_ptr, table_stride, HEADS: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = ropes.shape[1]
    ROPE: gl.constexpr = ropes.shape[2]
    RANK: gl.constexpr = 2 * halves.shape[2]
    LINES: gl.constexpr = q_halves.shape[1]
    PAGE: gl.constexpr = cache_desc.block_type.shape[1]
    # A swizzled tile's columns lie in parts of 64, each part's lines one after the other: so do a page's.
    pages = halves._reinterpret(halves.dtype, [2 * (RANK // PART) * (TOKENS // PAGE), 1, PAGE, PART], cache_desc.layout)
    rope_pages = ropes._reinterpret(
        halves.dtype, [2 * (ROPE // PART) * (TOKENS // PAGE), 1, PAGE, PART], cache_desc.layout
    )
    even = 0
    odd = 0
    turn = 0
    number = first_item
    more = (first_item >= 0).to(gl.int32)
    while more > 0:
        row, seat, begin, end, more, _pieces = _piece(items_ptr, number)
        number += 1
        table = table_ptr + seat.to(gl.int64) * table_stride
        count = gl.maximum((end - begin + TOKENS - 1) // TOKENS, 1)
        for i in range(count):
            place = i % 2
            uses = even
            if place == 1:
                uses = odd
            _bring(
                cache_desc, pages, rope_pages, full, empty, place, uses & 1, table, begin + i * TOKENS, end,
                RANK, ROPE, PAGE, TOKENS,
            )  # fmt: skip
            even += 1 - place
            odd += place
            if i == 0:  # not before: the queries' place is taken until the last scores of the piece before are there
                _bring_queries(
                    q_desc, q_halves, q_rope, q_full, q_empty, turn, row * HEADS + gl.program_id(0) * LINES, RANK, ROPE
                )  # fmt: skip
        turn += 1


@gluon.jit
def _weigh(s, top, total, token, end, scale, masked, PAGE: gl.constexpr):
    """Weights of one tile's scores relative to new tops, and what those relative to the old ones shrink by; scores in
    units of log 2. top: a line's largest score, or one that is less by no more than SLACK.

    total: the weights' sums, [lines, 8], a line's in as many parts as `fold` leaves.
    """
    if masked:
        position = token + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        rest = end % PAGE
        whole = end - rest
        shifted = position - (PAGE - rest)  # of the last page's tokens
        position = gl.where(position < whole, position, gl.where(shifted < whole, 1 << 30, shifted))
        s = gl.where((position < end)[None, :], s, float("-inf"))
    peak = gl.convert_layout(gl.max(fold(s, False), axis=1), top.type.layout)
    peak = peak * scale
    new_top = gl.where(peak > top + SLACK, peak, top)
    p = gl.exp2(s * scale - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    part = gl.convert_layout(fold(p, True), total.type.layout)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + part
    return p, new_top, total, shrink


@gluon.jit
def _scores(q_halves, q_rope, halves, ropes, full, parity, NUMBER: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Of one's own tile, in its place once that is full."""
    TOKENS: gl.constexpr = ropes.shape[1]
    LINES: gl.constexpr = q_halves.shape[1]
    nothing = _nothing()
    place = NUMBER + nothing
    mbarrier.wait(full.index(2 * place), parity)
    zero = gl.zeros([LINES, TOKENS], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_rope.index(nothing), ropes.index(place).permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(q_halves.index(nothing), halves.index(2 * place).permute([1, 0]), s, is_async=True)
    mbarrier.wait(full.index(2 * place + 1), parity)
    s = warpgroup_mma(q_halves.index(nothing + 1), halves.index(2 * place + 1).permute([1, 0]), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _give(
    p, acc, top, shrink, halves, empty, weights, tops, ready, NUMBER: gl.constexpr,
):  # fmt: skip
    """Weights of one's own tile: to the other consumer, and onto one's own columns."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    HALF: gl.constexpr = 2 * NUMBER + NUMBER  # one's own of one's own tile
    weights.store(p)
    tops.store(top)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready.index(NUMBER), count=1)
    acc = rescale(acc, shrink)
    mixed = warpgroup_mma(gl.convert_layout(p, LEFT), halves.index(HALF), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[mixed])
    mbarrier.arrive(empty.index(HALF), count=1)
    return acc


@gluon.jit
def _take(
    acc, top, total, halves, full, empty, weights, tops, ready, others, NUMBER: gl.constexpr,
):  # fmt: skip
    """The weights of the other one's tile number `others` onto one's own columns."""
    HALF: gl.constexpr = 2 * (1 - NUMBER) + NUMBER  # one's own of the other's tile
    mbarrier.wait(ready.index(1 - NUMBER), others & 1)
    new_top = tops.load(top.type.layout)
    shrink = gl.exp2(top - new_top)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]
    acc = rescale(acc, shrink)
    mbarrier.wait(full.index(HALF), others & 1)  # long since; but here it was not seen yet
    mixed = warpgroup_mma(weights, halves.index(HALF), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[mixed])
    mbarrier.arrive(empty.index(HALF), count=1)
    return acc, new_top, total


@gluon.jit
def _leave(
    acc, top, total, out_ptr, partial_ptr, lse_ptr, row, number, pieces,
    NUMBER: gl.constexpr, HEADS: gl.constexpr, RANK: gl.constexpr,
):  # fmt: skip
    """A piece's results to where they belong: if it is all of its row, to the output."""
    LINES: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1]
    LINE: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    inverse = gl.where(total > 0, 1.0 / total, 0.0)  # a row may have no tokens
    acc = acc * gl.convert_layout(inverse, LINE)[:, None]
    line = gl.program_id(0) * LINES + gl.arange(0, LINES, LINE)
    column = NUMBER * HALF + gl.arange(0, HALF, gl.SliceLayout(0, acc.type.layout))
    there = (line < HEADS)[:, None]
    if pieces == 1:
        at = (row.to(gl.int64) * HEADS + line)[:, None] * RANK + column[None, :]
        gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), there)
    else:
        first = number.to(gl.int64) * HEADS
        at = (first + line)[:, None] * RANK + column[None, :]
        gl.store(partial_ptr + at, acc, there)
        if NUMBER == 0:
            own = gl.program_id(0) * LINES + gl.arange(0, LINES, top.type.layout)
            lse = gl.where(total > 0, top + gl.log2(total), -1.0e30)
            gl.store(lse_ptr + first + own, lse, own < HEADS)


@gluon.jit
def _consume(
    out_ptr, partial_ptr, lse_ptr, q_halves, q_rope, halves, ropes, weights, tops, totals, full, empty, q_full, q_empty,
    ready, met, items_ptr, first_item, scale,
    NUMBER: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = ropes.shape[1]
    LINES: gl.constexpr = q_halves.shape[1]
    HALF: gl.constexpr = halves.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    SUM_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PARTS, 16])
    LINE: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    mine = 0
    others = 0
    turn = 0
    number = first_item
    more = (first_item >= 0).to(gl.int32)
    while more > 0:
        row, _seat, begin, end, more, pieces = _piece(items_ptr, number)
        count = gl.maximum((end - begin + TOKENS - 1) // TOKENS, 1)
        top = gl.full([LINES], -1.0e29, gl.float32, LINE)  # finite, so that a wholly masked line makes no NaN
        total = gl.zeros([LINES, PARTS], gl.float32, SUM_LAYOUT)
        acc = gl.zeros([LINES, HALF], gl.float32, ACC_LAYOUT)
        mbarrier.wait(q_full, turn & 1)
        if NUMBER == 1:  # with one tile alone it has no scores to compute
            mbarrier.arrive(q_empty, count=1, pred=count == 1)
        for i in range(NUMBER, count, 2):
            if i > 0:
                acc, top, total = _take(acc, top, total, halves, full, empty, weights, tops, ready, others, NUMBER)
                others += 1
            s = _scores(q_halves, q_rope, halves, ropes, full, mine & 1, NUMBER, S_LAYOUT)
            mbarrier.arrive(q_empty, count=1, pred=i + 2 >= count)
            token = begin + i * TOKENS
            p, top, total, shrink = _weigh(s, top, total, token, end, scale, token + TOKENS > end, PAGE)
            acc = _give(
                p.to(halves.dtype), acc, top, shrink, halves, empty, weights, tops, ready, NUMBER
            )  # fmt: skip
            mine += 1
        if count % 2 == NUMBER:  # the last tile is the other's
            acc, top, total = _take(acc, top, total, halves, full, empty, weights, tops, ready, others, NUMBER)
            others += 1
        # Both have their own tiles' weights summed.
        both = gl.convert_layout(gl.sum(total, axis=1), LINE)
        totals.index(turn % 2 * 2 + NUMBER).store(both)
        gl.thread_barrier()
        mbarrier.arrive(met, count=1)
        mbarrier.wait(met, turn & 1)
        both += totals.index(turn % 2 * 2 + 1 - NUMBER).load(LINE)
        _leave(
            acc, top, both, out_ptr, partial_ptr, lse_ptr, row, number, pieces, NUMBER, HEADS, 2 * HALF
        )  # fmt: skip
        turn += 1
        number += 1


def constants(num_heads: int, rank: int, width: int) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    return {
        "HEADS": num_heads, "RANK": rank, "ROPE": width - rank, "LINES": LINES, "TOKENS": TOKENS, "PDL": True,
    }  # fmt: skip


@gluon.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "lse_ptr", "heads_ptr"],
)
def _latent_sm90_kernel(
    q_desc, cache_desc, out_ptr, partial_ptr, lse_ptr, items_ptr, heads_ptr, table_ptr, table_stride, scale,
    HEADS: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, LINES: gl.constexpr, TOKENS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    PAGE: gl.constexpr = cache_desc.block_type.shape[1]
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(TOKENS * 2, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COUNTER: gl.constexpr = mbarrier.MBarrierLayout()
    first_item = gl.load(heads_ptr + gl.program_id(1))
    q_halves = gl.allocate_shared_memory(dtype, [2, LINES, RANK // 2], TILE)
    halves = gl.allocate_shared_memory(dtype, [4, TOKENS, RANK // 2], TILE)
    q_rope = gl.allocate_shared_memory(dtype, [1, LINES, ROPE], TILE)
    ropes = gl.allocate_shared_memory(dtype, [2, TOKENS, ROPE], TILE)
    weights = gl.allocate_shared_memory(dtype, [LINES, TOKENS], WEIGHTS)
    tops = gl.allocate_shared_memory(gl.float32, [LINES], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [4, LINES], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], COUNTER)
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], COUNTER)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], COUNTER)
    q_full = gl.allocate_shared_memory(gl.int64, [1], COUNTER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], COUNTER)
    met = gl.allocate_shared_memory(gl.int64, [1], COUNTER)
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(met, count=2)
    fence_async_shared()
    follow(PDL)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                out_ptr, partial_ptr, lse_ptr, q_halves, q_rope, halves, ropes, weights, tops, totals, full, empty,
                q_full, q_empty, ready, met, items_ptr, first_item, scale, FIRST, HEADS, PAGE,
            )),
            (_consume, (
                out_ptr, partial_ptr, lse_ptr, q_halves, q_rope, halves, ropes, weights, tops, totals, full, empty,
                q_full, q_empty, ready, met, items_ptr, first_item, scale, SECOND, HEADS, PAGE,
            )),
            (_produce, (
                q_desc, cache_desc, q_halves, q_rope, halves, ropes, full, empty, q_full, q_empty,
                items_ptr, first_item, table_ptr, table_stride, HEADS,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [224, 56],  # their registers; the first consumer gets the rest, 224
    )  # fmt: skip


def takes(cached: LatentRows) -> bool:
    """Whether the kernel is made for such a cache, on a device of capability 9.0."""
    return cached == LatentRows(RANK, ROPE, PAGE, torch.bfloat16)


def programs(num_heads: int, device: torch.device) -> int:
    """For rows of so many heads: blocks that share out the tokens, one a processor for all of them."""
    return max(num_processors(device) // -(-num_heads // LINES), 1)


def decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    block_table: torch.Tensor,
    items: torch.Tensor,
    heads: torch.Tensor,
    scale: float,
    partial: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `quire.kernels.attention.latent_paged`, and for items and heads `latent_schedule`. Results of rows in several
    pieces go to `partial` and `lse`."""
    num_heads, width = q.shape[1:]
    shape, strides = [len(cache), PAGE, width], [cache.stride(0), width, 1]
    _latent_sm90_kernel[(-(-num_heads // LINES), len(heads))](
        TensorDescriptor.from_tensor(q.view(-1, width), [LINES, PART.value], SWIZZLED),
        TensorDescriptor(cache[:, 0], shape, strides, [1, PAGE, PART.value], PAGED), out, partial, lse, items, heads,
        block_table, block_table.stride(0), scale * LOG2_E, **constants(num_heads, rank, width), num_warps=4,
        launch_pdl=True,
    )  # fmt: skip
