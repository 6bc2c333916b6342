"""The causal prefill kernel for compute capability 9.0, after FlashAttention-3 (Shah et al., 2024), in Gluon.

A block of threads stays on its processor and works through items: a KV head and a tile of TOKENS consecutive tokens of
one row, each with all query heads of the KV head; line l is token l // GROUP, head l % GROUP. Its warps have roles. The
producer, one warp, looks items up, tells the consumers, and keeps the bulk copy engine busy: K and V come in tiles of
BLOCK_N tokens, page by page, through rings of STAGES in shared memory. The two consumers, four warps each, have half of
the lines each. A consumer computes a tile's scores while the weights of the one before meet its values, and the two
take turns at the matrix units, so that one's products run while the other's softmax does.

Items are dealt to the blocks from the longest to the shortest (`prefill_schedule`), forwards and backwards in turn,
which gives all blocks about as much to read. K and V are read from the last tile down: those that need a mask first.

A row's last page is rarely full, and what lies past the row's end may be anything, NaN included. So that page is copied
from a line before its own first: its tokens end where the page does and before them are the zeros that the copy engine
gives for what lies outside. The mask knows.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.attention.triton.decode import LOG2_E
from quire.kernels.attention.triton.prefill_softmax_sm90 import PARTS, rescale, softmax
from quire.kernels.triton.descriptors import described
from quire.kernels.triton.launch import has_pdl, next_power_of_2, num_processors
from quire.kernels.triton.launches import launch

PAGE = 16
PAGES = gl.NVMMASharedLayout(128, 16, 4)
LINES = 64  # of a consumer: what its four warps' matrix instructions take
SHORT, LONG = (64, 4), (128, 2)  # (BLOCK_N, STAGES): for rows of few tokens, where the diagonal weighs; for others
WIDE = (64, 2)  # of wide heads, whose sums take most registers and whose queries take much of shared memory
MAX_SHORT = 1024  # query tokens, as measured on an H200

_built: set[tuple[object, ...]] = set()  # what kernels were compiled for


@gluon.constexpr_function
def _barrier(verb, number):
    """A barrier of one consumer that waits and one that signals; the compiler numbers its own from 0."""
    return f"bar.{verb} {8 + number}, 256; // $0"


@gluon.jit
def _asm(TEXT: gl.constexpr):
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _tell(notes, slot, FIELD: gl.constexpr, value):
    notes.index(slot * 8 + FIELD).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _hear(notes, slot, FIELD: gl.constexpr):
    return gl.sum(notes.index(slot * 8 + FIELD).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def _look_up(
    turn, notes, note_full, note_empty, items_ptr, num_items,
    KV_HEADS: gl.constexpr, TOKENS: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Finds this block's item number `turn` and tells the consumers; no tiles: there is none."""
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    item = turn * blocks + gl.where(turn % 2 == 0, block, blocks - 1 - block)
    kv_head = item % KV_HEADS
    number = item // KV_HEADS
    token = gl.to_tensor(0)
    alive = gl.to_tensor(0)
    seq_len = gl.to_tensor(0)
    seat = gl.to_tensor(0)
    if number < num_items:
        at = items_ptr + number * 4
        token = gl.load(at)
        alive = gl.load(at + 1)
        seq_len = gl.load(at + 2)
        seat = gl.load(at + 3)
    last = gl.to_tensor(0)
    masked = gl.to_tensor(0)
    count = gl.to_tensor(0)
    if alive > 0:
        position = seq_len - alive
        last = (gl.minimum(position + TOKENS, seq_len) - 1) // BLOCK_N
        begin = gl.to_tensor(0)
        free = (position + 1) // BLOCK_N  # tiles before it are seen by every line
        if WINDOW > 0:
            begin = gl.maximum(position + 1 - WINDOW, 0) // BLOCK_N
            free = begin
        masked = last - free
        count = last - begin + 1
    slot = turn % 2
    mbarrier.wait(note_empty.index(slot), (turn // 2) & 1 ^ 1)
    _tell(notes, slot, 0, kv_head)
    _tell(notes, slot, 1, token)
    _tell(notes, slot, 2, alive)
    _tell(notes, slot, 3, seq_len)
    _tell(notes, slot, 4, last)
    _tell(notes, slot, 5, masked)
    _tell(notes, slot, 6, count)
    mbarrier.arrive(note_full.index(slot), count=1)
    first_page = gl.to_tensor(0)
    if WINDOW > 0:
        first_page = gl.maximum(seq_len - alive + 1 - WINDOW, 0) // PAGE
    return kv_head, seat, seq_len, last, count, first_page


@gluon.jit
def _listen(notes, note_full, note_empty, turn):
    """KV head, first token, tokens from there to the row's end, the row's tokens, last tile, tiles after the last that
    need a mask, tiles."""
    slot = turn % 2
    mbarrier.wait(note_full.index(slot), (turn // 2) & 1)
    kv_head = _hear(notes, slot, 0)
    token = _hear(notes, slot, 1)
    alive = _hear(notes, slot, 2)
    seq_len = _hear(notes, slot, 3)
    last = _hear(notes, slot, 4)
    masked = _hear(notes, slot, 5)
    count = _hear(notes, slot, 6)
    mbarrier.arrive(note_empty.index(slot), count=1)
    return kv_head, token, alive, seq_len, last, masked, count


@gluon.jit
def _bring(
    desc, pages, full, empty, step, table, tile, first_page, seq_len, kv_head,
    WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a tile of K or V into its stage, once that is free."""
    PAGES: gl.constexpr = BLOCK_N // PAGE
    PARTS: gl.constexpr = WIDTH // 64  # a page comes in parts of the swizzle's width, 128 bytes
    stage = step % STAGES
    last = (seq_len - 1) // PAGE
    page = ()
    for i in gl.static_range(PAGES):
        index = gl.minimum(tile * PAGES + i, last)
        if WINDOW > 0:  # what lies before may have been given back, and be anything by now
            index = gl.maximum(index, first_page)
        page += (gl.load(table + index),)
    mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
    ready = full.index(stage)
    mbarrier.expect(ready, BLOCK_N * WIDTH * 2)
    for i in gl.static_range(PAGES):
        line = gl.minimum(seq_len - (tile * PAGES + i + 1) * PAGE, 0)
        for part in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(
                desc, [page[i], kv_head, line, part * 64], ready,
                pages.index((stage * PARTS + part) * PAGES + i),
            )  # fmt: skip


@gluon.jit
def _produce(
    k_desc, v_desc, k_pages, v_pages, k_full, k_empty, v_full, v_empty, notes, note_full, note_empty,
    items_ptr, num_items, table_ptr, table_stride,
    KV_HEADS: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr, WINDOW: gl.constexpr,
    TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    turn = 0
    kv_head, seat, seq_len, last, count, first_page = _look_up(
        turn, notes, note_full, note_empty, items_ptr, num_items, KV_HEADS, TOKENS, WINDOW, BLOCK_N, PAGE,
    )  # fmt: skip
    while count > 0:
        turn += 1
        table = table_ptr + seat.to(gl.int64) * table_stride
        next_kv_head = kv_head
        next_seat = seat
        next_seq_len = seq_len
        next_last = last
        next_count = count
        next_first_page = first_page
        for i in range(count + 1):  # in the order in which the consumers need them: K of a tile, V of the one before
            if i < count:
                _bring(
                    k_desc, k_pages, k_full, k_empty, step + i, table, last - i, first_page, seq_len, kv_head,
                    WINDOW, BLOCK_N, WIDTH, PAGE, STAGES,
                )  # fmt: skip
            if i > 0:
                _bring(
                    v_desc, v_pages, v_full, v_empty, step + i - 1, table, last - i + 1, first_page, seq_len,
                    kv_head, WINDOW, BLOCK_N, WIDTH, PAGE, STAGES,
                )  # fmt: skip
            if i == 1:  # not before: the consumers wait for the first tiles
                next_kv_head, next_seat, next_seq_len, next_last, next_count, next_first_page = _look_up(
                    turn, notes, note_full, note_empty, items_ptr, num_items, KV_HEADS, TOKENS, WINDOW, BLOCK_N, PAGE,
                )  # fmt: skip
        step += count
        kv_head = next_kv_head
        seat = next_seat
        seq_len = next_seq_len
        last = next_last
        count = next_count
        first_page = next_first_page


@gluon.jit
def _steps(
    acc, p, top, total, step, tile, count, masked, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    query_position, seq_len, scale, WINDOW: gl.constexpr, PAGE: gl.constexpr, MINE: gl.constexpr, NEXT: gl.constexpr,
):  # fmt: skip
    """`count` tiles from `tile` downwards: scores of one while the weights `p` of the one before meet its values."""
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    LINES: gl.constexpr = q_tile.shape[0]
    S_LAYOUT: gl.constexpr = top.type.layout.parent
    for i in range(count):
        after = step + 1
        stage = after % STAGES
        mbarrier.wait(k_full.index(stage), (after // STAGES) & 1)
        _asm(MINE)
        zero = gl.zeros([LINES, BLOCK_N], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q_tile, k_tiles.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        mixed = warpgroup_mma(p, v_tiles.index(step % STAGES), acc, is_async=True)
        _asm(NEXT)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, top, total, shrink = softmax(
            s, top, total, (tile - i) * BLOCK_N, query_position, seq_len, scale, i < masked, WINDOW, BLOCK_N, PAGE
        )
        # This wait is the next step's. Here its branch keeps the assembler from moving the one below ahead of the
        # softmax, which shall overlap with the product.
        mbarrier.wait(v_full.index(stage), (after // STAGES) & 1)
        acc = warpgroup_mma_wait(0, deps=[mixed])
        mbarrier.arrive(v_empty.index(step % STAGES), count=1)
        acc = rescale(acc, shrink)
        p = gl.convert_layout(weights.to(q_tile.dtype), p.type.layout)
        step = after
    return acc, p, top, total, step


@gluon.jit
def _fetch_queries(
    q_tile, q_ptr, q_stride, kv_head, token, alive,
    NUMBER: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    LINES: gl.constexpr = q_tile.shape[0]
    line = NUMBER * LINES + gl.arange(0, LINES, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, q_tile.shape[1], gl.SliceLayout(0, LAYOUT))
    at = (token + line // GROUP).to(gl.int64) * q_stride + (kv_head * GROUP + line % GROUP) * DIM
    inside = ((line < TOKENS * GROUP) & (line // GROUP < alive))[:, None] & (column < DIM)[None, :]
    async_copy.async_copy_global_to_shared(q_tile, q_ptr + at[:, None] + column[None, :], inside)
    async_copy.commit_group()


@gluon.jit
def _consume(
    q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, notes, note_full, note_empty,
    q_stride, scale,
    NUMBER: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    WINDOW: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    AHEAD: gl.constexpr = q_tiles.shape[0] // 2  # items that have room for their queries
    LINES: gl.constexpr = q_tiles.shape[1]
    WIDTH: gl.constexpr = q_tiles.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    LINE: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    MINE: gl.constexpr = _barrier("sync", NUMBER)
    NEXT: gl.constexpr = _barrier("arrive", 1 - NUMBER)
    if NUMBER == 1:  # the first turn is the other's
        _asm(NEXT)
    step = 0
    turn = 0
    kv_head, token, alive, seq_len, last, masked, count = _listen(notes, note_full, note_empty, turn)
    _fetch_queries(
        q_tiles.index(NUMBER), q_ptr, q_stride, kv_head, token, alive, NUMBER, GROUP, DIM, TOKENS, Q_LAYOUT
    )  # fmt: skip
    while count > 0:
        q_tile = q_tiles.index(turn % AHEAD * 2 + NUMBER)
        turn += 1
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()

        query_position = seq_len - alive + (NUMBER * LINES + gl.arange(0, LINES, LINE)) // GROUP
        top = gl.full([LINES], -1.0e29, gl.float32, LINE)  # finite, so that a wholly masked line makes no NaN
        total = gl.zeros([LINES, PARTS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PARTS, 16]))
        acc = gl.zeros([LINES, WIDTH], gl.float32, ACC_LAYOUT)
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        zero = gl.zeros([LINES, BLOCK_N], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q_tile, k_tiles.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, top, total, _ = softmax(
            s, top, total, last * BLOCK_N, query_position, seq_len, scale, True, WINDOW, BLOCK_N, PAGE
        )
        p = gl.convert_layout(weights.to(q_tile.dtype), P_LAYOUT)
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        next_kv_head, next_token, next_alive, next_seq_len, next_last, next_masked, next_count = _listen(
            notes, note_full, note_empty, turn
        )
        if AHEAD == 2:
            _fetch_queries(
                q_tiles.index(turn % 2 * 2 + NUMBER), q_ptr, q_stride, next_kv_head, next_token, next_alive,
                NUMBER, GROUP, DIM, TOKENS, Q_LAYOUT,
            )  # fmt: skip
        gl.thread_barrier()  # or the compiler puts one into the loop, for these writes
        acc, p, top, total, step = _steps(
            acc, p, top, total, step, last - 1, count - 1, masked, q_tile, k_tiles, v_tiles,
            k_full, k_empty, v_full, v_empty, query_position, seq_len, scale, WINDOW, PAGE, MINE, NEXT,
        )  # fmt: skip
        mixed = warpgroup_mma(p, v_tiles.index(step % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[mixed])
        mbarrier.arrive(v_empty.index(step % STAGES), count=1)
        step += 1

        # Out through the queries' place, so that whole lines are written.
        acc = acc * gl.convert_layout(1.0 / gl.sum(total, axis=1), gl.SliceLayout(1, ACC_LAYOUT))[:, None]
        gl.thread_barrier()
        q_tile.store(acc.to(q_tile.dtype))
        gl.thread_barrier()
        line = NUMBER * LINES + gl.arange(0, LINES, gl.SliceLayout(1, Q_LAYOUT))
        at = ((token + line // GROUP).to(gl.int64) * KV_HEADS + kv_head) * GROUP + line % GROUP
        column = gl.arange(0, WIDTH, gl.SliceLayout(0, Q_LAYOUT))
        inside = ((line < TOKENS * GROUP) & (line // GROUP < alive))[:, None] & (column < DIM)[None, :]
        gl.store(out_ptr + at[:, None] * DIM + column[None, :], q_tile.load(Q_LAYOUT), inside)
        if AHEAD == 1:
            gl.thread_barrier()  # the result has left the queries' place
            _fetch_queries(
                q_tile, q_ptr, q_stride, next_kv_head, next_token, next_alive,
                NUMBER, GROUP, DIM, TOKENS, Q_LAYOUT,
            )  # fmt: skip
        kv_head = next_kv_head
        token = next_token
        alive = next_alive
        seq_len = next_seq_len
        last = next_last
        masked = next_masked
        count = next_count
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["num_items", "table_stride"], do_not_specialize_on_alignment=["table_ptr"])
def _prefill_sm90_kernel(
    q_ptr, out_ptr, k_desc, v_desc, items_ptr, num_items, table_ptr, q_stride, table_stride, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, WINDOW: gl.constexpr,
    LINES: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = 2 * LINES // GROUP
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    COUNTER: gl.constexpr = mbarrier.MBarrierLayout()
    PAGES: gl.constexpr = STAGES * (BLOCK_N // PAGE) * (WIDTH // 64)
    ITEMS: gl.constexpr = 2 if WIDTH <= 128 else 1  # this one and, where there is room, the next
    q_tiles = gl.allocate_shared_memory(dtype, [2 * ITEMS, LINES, WIDTH], SWIZZLED)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, WIDTH], SWIZZLED)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, WIDTH], SWIZZLED)
    # A swizzled tile's columns lie in parts of 64, each part's lines one after the other: so do a page's.
    k_pages = k_tiles._reinterpret(dtype, [PAGES, 1, 1, PAGE, 64], k_desc.layout)
    v_pages = v_tiles._reinterpret(dtype, [PAGES, 1, 1, PAGE, 64], v_desc.layout)
    notes = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    note_full = gl.allocate_shared_memory(gl.int64, [2, 1], COUNTER)
    note_empty = gl.allocate_shared_memory(gl.int64, [2, 1], COUNTER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(note_full.index(i), count=1)
        mbarrier.init(note_empty.index(i), count=2)
    fence_async_shared()
    if PDL:  # for all warps: the others start after this
        _asm("griddepcontrol.wait; // $0")
        _asm("griddepcontrol.launch_dependents; // $0")
    CONSUMERS: gl.constexpr = 224 if WIDTH <= 128 else 232
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                notes, note_full, note_empty, q_stride, scale, FIRST, KV_HEADS, GROUP, DIM, PAGE, WINDOW, TOKENS,
            )),
            (_consume, (
                q_ptr, out_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                notes, note_full, note_empty, q_stride, scale, SECOND, KV_HEADS, GROUP, DIM, PAGE, WINDOW, TOKENS,
            )),
            (_produce, (
                k_desc, v_desc, k_pages, v_pages, k_full, k_empty, v_full, v_empty, notes, note_full, note_empty,
                items_ptr, num_items, table_ptr, table_stride,
                KV_HEADS, WIDTH, PAGE, WINDOW, TOKENS, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [CONSUMERS, 504 - 2 * CONSUMERS],  # their registers; the first consumer gets the rest
    )  # fmt: skip


def takes(kv_dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Whether the kernel is made for such a model, on a device of capability 9.0."""
    return (
        kv_dtype in (torch.bfloat16, torch.float16)
        and head_dim in range(64, 257, 8)  # what the copy engine takes is multiples of 16 bytes
        and block_size == PAGE
        and num_heads // num_kv_heads <= 2 * LINES
    )


def tokens(group: int) -> int:
    """Of an item, for `group` query heads a KV head."""
    return 2 * LINES // group


def _descriptor(cache: torch.Tensor) -> TensorDescriptor:
    """Tells the copy engine of [num_blocks, num_kv_heads, PAGE, head_dim], to be read in parts of a page."""
    return described(TensorDescriptor, cache, (1, 1, PAGE, 64), PAGES)


def width(head_dim: int) -> int:
    """Columns of tiles; those behind a head's own are zeros."""
    return max(next_power_of_2(head_dim), 64)


def shapes(head_dim: int) -> tuple[tuple[int, int], ...]:
    """All (BLOCK_N, STAGES) that there are."""
    return (SHORT, LONG) if width(head_dim) <= 128 else (WIDE,)


def shape(head_dim: int, max_query_len: int) -> tuple[int, int]:
    """(BLOCK_N, STAGES) for rows of up to so many query tokens."""
    found = shapes(head_dim)
    return found[0] if max_query_len <= MAX_SHORT else found[-1]


def prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    tiles: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int,
    out: torch.Tensor,
) -> None:
    """See `quire.kernels.attention.paged`; `tiles` from `prefill_schedule.tiles`, of `tokens` tokens.

    The first call for a model compiles all that later ones need.
    """
    num_heads, dim = q.shape[1:]
    num_kv_heads = k_cache.shape[1]
    pdl = has_pdl(q.device)
    arguments = (
        q, out, _descriptor(k_cache), _descriptor(v_cache), tiles, len(tiles), block_table, q.stride(0),
        block_table.stride(0), scale * LOG2_E,
    )  # fmt: skip
    options = {
        "KV_HEADS": num_kv_heads, "GROUP": num_heads // num_kv_heads, "DIM": dim, "PAGE": PAGE,
        "WINDOW": sliding_window, "LINES": LINES, "WIDTH": width(dim), "PDL": pdl, "num_warps": 4, "launch_pdl": pdl,
    }  # fmt: skip
    model = (q.device, q.dtype, num_heads, num_kv_heads, dim, sliding_window)
    if model not in _built:
        for block_n, stages in shapes(dim):
            _prefill_sm90_kernel.warmup(*arguments, BLOCK_N=block_n, STAGES=stages, grid=(1,), **options)
        _built.add(model)
    block_n, stages = shape(dim, max_query_len)
    grid = (min(len(tiles) * num_kv_heads, num_processors(q.device)),)
    launch(_prefill_sm90_kernel, grid, *arguments, BLOCK_N=block_n, STAGES=stages, **options)
