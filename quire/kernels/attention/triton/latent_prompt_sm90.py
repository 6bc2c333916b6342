"""Causal attention of prompts over keys and values that were made of latent rows, for compute capability 9.0, in Gluon.

Built as `prefill_sm90` is, whose roles, turns and softmax these are. What differs: keys and values lie one token
behind the other, a head's beside the next one's, so a tile of them is one copy a part and needs no table. A key is NOPE
columns of its head and 64 rotary ones that all heads share, which come from the latent rows themselves; it is wider
than a value. Parts of 64 columns are the swizzle's width, and products of queries and keys go over one after the other.

There is no room for the queries of two items. Those of the next are fetched when the last scores of this one are there,
beside its last product and its way out.

Items are a head and TOKENS consecutive tokens of one row, from the longest to the shortest, those of a section of heads
after those of another, and a block takes the next that nobody has yet: so what runs at one time reads few heads, whose
keys and values stay in the L2 cache.
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

from quire.kernels.attention.triton.operand import LOG2_E
from quire.kernels.attention.triton.prefill_sm90 import LINES, _asm, _barrier, _listen, _tell
from quire.kernels.attention.triton.prefill_softmax_sm90 import PARTS, rescale, softmax
from quire.kernels.triton.launch import has_pdl, num_processors

TOKENS = 2 * LINES  # of an item
WIDTH = 64  # columns of a part
BLOCK_N, STAGES = 128, 2
SECTION_BYTES = 24 * 2**20  # of keys and values that are read at one time: half of the L2 cache


@gluon.jit
def _look_up(
    turn, notes, note_full, note_empty, items_ptr, num_items, counter_ptr, heads, section,
    TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Takes the block's item number `turn` and tells the consumers; no tiles: there is none."""
    blocks = gl.num_programs(0)
    item = gl.program_id(0)
    if turn > 0:
        item = blocks + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    total = heads * num_items
    head = gl.to_tensor(0)
    token = gl.to_tensor(0)
    alive = gl.to_tensor(0)
    seq_len = gl.to_tensor(0)
    start = gl.to_tensor(0)
    while (item < total) & (alive == 0):
        first_head = item // (section * num_items) * section
        rest = item - first_head * num_items
        width = gl.minimum(section, heads - first_head)
        head = first_head + rest % width
        at = items_ptr + rest // width * 4
        token = gl.load(at)
        alive = gl.load(at + 1)
        seq_len = gl.load(at + 2)
        start = gl.load(at + 3)
        if alive == 0:
            item = blocks + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    last = gl.to_tensor(0)
    masked = gl.to_tensor(0)
    count = gl.to_tensor(0)
    if alive > 0:
        position = seq_len - alive
        last = (gl.minimum(position + TOKENS, seq_len) - 1) // BLOCK_N
        masked = last - (position + 1) // BLOCK_N  # tiles before these are seen by every line
        count = last + 1
    slot = turn % 2
    mbarrier.wait(note_empty.index(slot), (turn // 2) & 1 ^ 1)
    _tell(notes, slot, 0, head)
    _tell(notes, slot, 1, token)
    _tell(notes, slot, 2, alive)
    _tell(notes, slot, 3, seq_len)
    _tell(notes, slot, 4, last)
    _tell(notes, slot, 5, masked)
    _tell(notes, slot, 6, count)
    mbarrier.arrive(note_full.index(slot), count=1)
    return head, token, start, last, count


@gluon.jit
def _bring_queries(q_desc, q_parts, q_full, q_empty, turn, column, token):
    """Starts the copies of an item's queries, once nobody needs those of the item before."""
    PARTS: gl.constexpr = q_parts.shape[0] // 2
    LINES: gl.constexpr = q_parts.shape[1]
    for number in gl.static_range(2):
        mbarrier.wait(q_empty.index(number), turn & 1 ^ 1)
        ready = q_full.index(number)
        mbarrier.expect(ready, PARTS * LINES * 128)
        for part in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(
                q_desc, [token + number * LINES, column + part * 64], ready, q_parts.index(number * PARTS + part)
            )


@gluon.jit
def _bring_keys(
    kv_desc, rows_desc, k_parts, full, empty, step, line, column, RANK: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Starts the copies of a tile of keys into its stage, once that is free: those of the head, and the shared ones."""
    PARTS: gl.constexpr = k_parts.shape[0] // STAGES
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
    ready = full.index(stage)
    mbarrier.expect(ready, PARTS * k_parts.shape[1] * 128)
    for part in gl.static_range(PARTS - 1):
        tma.async_copy_global_to_shared(kv_desc, [line, column + part * 64], ready, k_parts.index(stage * PARTS + part))
    tma.async_copy_global_to_shared(rows_desc, [line, RANK], ready, k_parts.index(stage * PARTS + PARTS - 1))


@gluon.jit
def _bring_values(kv_desc, v_parts, full, empty, step, line, column, STAGES: gl.constexpr):
    PARTS: gl.constexpr = v_parts.shape[0] // STAGES
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES) & 1 ^ 1)
    ready = full.index(stage)
    mbarrier.expect(ready, PARTS * v_parts.shape[1] * 128)
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(kv_desc, [line, column + part * 64], ready, v_parts.index(stage * PARTS + part))


@gluon.jit
def _produce(
    q_desc, kv_desc, rows_desc, q_parts, k_parts, v_parts, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    notes, note_full, note_empty, items_ptr, num_items, counter_ptr, heads, section, first_head,
    RANK: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    NOPE: gl.constexpr = (k_parts.shape[0] // STAGES - 1) * 64
    VALUE: gl.constexpr = v_parts.shape[0] // STAGES * 64
    TOKENS: gl.constexpr = 2 * q_parts.shape[1]
    step = 0
    turn = 0
    head, token, start, last, count = _look_up(
        turn, notes, note_full, note_empty, items_ptr, num_items, counter_ptr, heads, section, TOKENS, BLOCK_N,
    )  # fmt: skip
    while count > 0:
        column = head * (NOPE + VALUE)
        next_head = head
        next_token = token
        next_start = start
        next_last = last
        next_count = count
        for i in range(count + 1):  # in the order in which the consumers need them: K of a tile, V of the one before
            if i < count:
                line = start + (last - i) * BLOCK_N
                _bring_keys(kv_desc, rows_desc, k_parts, k_full, k_empty, step + i, line, column, RANK, STAGES)
            if i == 0:
                _bring_queries(q_desc, q_parts, q_full, q_empty, turn, (first_head + head) * (NOPE + 64), token)
            if i > 0:
                line = start + (last - i + 1) * BLOCK_N
                _bring_values(kv_desc, v_parts, v_full, v_empty, step + i - 1, line, column + NOPE, STAGES)
            if i == 1:  # not before: the consumers wait for the first tiles
                next_head, next_token, next_start, next_last, next_count = _look_up(
                    turn + 1, notes, note_full, note_empty, items_ptr, num_items, counter_ptr, heads, section,
                    TOKENS, BLOCK_N,
                )  # fmt: skip
        turn += 1
        step += count
        head = next_head
        token = next_token
        start = next_start
        last = next_last
        count = next_count


@gluon.jit
def _scores(q_parts, k_parts, stage, NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    """Begins a tile's scores, part after part."""
    PARTS: gl.constexpr = q_parts.shape[0] // 2
    LINES: gl.constexpr = q_parts.shape[1]
    BLOCK_N: gl.constexpr = k_parts.shape[1]
    s = gl.zeros([LINES, BLOCK_N], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        q = q_parts.index(NUMBER * PARTS + part)
        k = k_parts.index(stage * PARTS + part).permute([1, 0])
        s = warpgroup_mma(q, k, s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def _steps(
    acc, p, top, total, step, tile, count, masked, q_parts, k_parts, v_tiles, k_full, k_empty, v_full, v_empty,
    query_position, seq_len, scale, NUMBER: gl.constexpr, MINE: gl.constexpr, NEXT: gl.constexpr,
):  # fmt: skip
    """`count` tiles from `tile` downwards: scores of one while the weights `p` of the one before meet its values."""
    STAGES: gl.constexpr = v_tiles.shape[0]
    BLOCK_N: gl.constexpr = v_tiles.shape[1]
    S_LAYOUT: gl.constexpr = top.type.layout.parent
    dtype: gl.constexpr = v_tiles.dtype
    for i in range(count):
        after = step + 1
        stage = after % STAGES
        mbarrier.wait(k_full.index(stage), (after // STAGES) & 1)
        _asm(MINE)
        s = _scores(q_parts, k_parts, stage, NUMBER, S_LAYOUT)
        mixed = warpgroup_mma(p, v_tiles.index(step % STAGES), acc, is_async=True)
        _asm(NEXT)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, top, total, shrink = softmax(
            s, top, total, (tile - i) * BLOCK_N, query_position, seq_len, scale, i < masked, 0, BLOCK_N, 1
        )
        mbarrier.wait(v_full.index(stage), (after // STAGES) & 1)  # the next step's: see `prefill_sm90`
        acc = warpgroup_mma_wait(0, deps=[mixed])
        mbarrier.arrive(v_empty.index(step % STAGES), count=1)
        acc = rescale(acc, shrink)
        p = gl.convert_layout(weights.to(dtype), p.type.layout)
        step = after
    return acc, p, top, total, step


@gluon.jit
def _consume(
    out_ptr, q_parts, k_parts, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, notes, note_full, note_empty,
    first_head, scale, NUMBER: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = v_tiles.shape[0]
    BLOCK_N: gl.constexpr = v_tiles.shape[1]
    VALUE: gl.constexpr = v_tiles.shape[2]
    LINES: gl.constexpr = q_parts.shape[1]
    dtype: gl.constexpr = v_tiles.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    LINE: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    MINE: gl.constexpr = _barrier("sync", NUMBER)
    NEXT: gl.constexpr = _barrier("arrive", 1 - NUMBER)
    if NUMBER == 1:  # the first turn is the other's
        _asm(NEXT)
    step = 0
    turn = 0
    head, token, alive, seq_len, last, masked, count = _listen(notes, note_full, note_empty, turn)
    while count > 0:
        mbarrier.wait(q_full.index(NUMBER), turn & 1)
        turn += 1
        query_position = seq_len - alive + NUMBER * LINES + gl.arange(0, LINES, LINE)
        top = gl.full([LINES], -1.0e29, gl.float32, LINE)  # finite, so that a wholly masked line makes no NaN
        total = gl.zeros([LINES, PARTS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PARTS, 16]))
        acc = gl.zeros([LINES, VALUE], gl.float32, ACC_LAYOUT)
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        s = _scores(q_parts, k_parts, stage, NUMBER, S_LAYOUT)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, top, total, _ = softmax(
            s, top, total, last * BLOCK_N, query_position, seq_len, scale, True, 0, BLOCK_N, 1
        )
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        acc, p, top, total, step = _steps(
            acc, p, top, total, step, last - 1, count - 1, masked, q_parts, k_parts, v_tiles, k_full, k_empty,
            v_full, v_empty, query_position, seq_len, scale, NUMBER, MINE, NEXT,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(NUMBER), count=1)
        mixed = warpgroup_mma(p, v_tiles.index(step % STAGES), acc, is_async=True)
        line = NUMBER * LINES + gl.arange(0, LINES, gl.SliceLayout(1, ACC_LAYOUT))
        column = gl.arange(0, VALUE, gl.SliceLayout(0, ACC_LAYOUT))
        to = out_ptr + (((token + line).to(gl.int64) * HEADS + first_head + head) * VALUE)[:, None] + column[None, :]
        inside = (line < alive)[:, None]
        head, token, alive, seq_len, last, masked, count = _listen(notes, note_full, note_empty, turn)
        acc = warpgroup_mma_wait(0, deps=[mixed])
        mbarrier.arrive(v_empty.index(step % STAGES), count=1)
        step += 1
        acc = acc * gl.convert_layout(1.0 / gl.sum(total, axis=1), gl.SliceLayout(1, ACC_LAYOUT))[:, None]
        gl.store(to, acc.to(dtype), inside)


@gluon.jit(
    do_not_specialize=["num_items", "heads", "section", "first_head"], do_not_specialize_on_alignment=["counter_ptr"]
)
def _latent_prompt_sm90_kernel(
    q_desc, kv_desc, rows_desc, out_ptr, items_ptr, num_items, counter_ptr, heads, section, first_head, scale,
    HEADS: gl.constexpr, RANK: gl.constexpr, NOPE: gl.constexpr, VALUE: gl.constexpr, LINES: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    COUNTER: gl.constexpr = mbarrier.MBarrierLayout()
    K_PARTS: gl.constexpr = NOPE // 64 + 1
    V_PARTS: gl.constexpr = VALUE // 64
    q_parts = gl.allocate_shared_memory(dtype, [2 * K_PARTS, LINES, 64], SWIZZLED)
    k_parts = gl.allocate_shared_memory(dtype, [STAGES * K_PARTS, BLOCK_N, 64], SWIZZLED)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, VALUE], SWIZZLED)
    v_parts = v_tiles._reinterpret(dtype, [STAGES * V_PARTS, BLOCK_N, 64], SWIZZLED)  # a swizzled tile is its parts
    notes = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], COUNTER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], COUNTER)
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
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(note_full.index(i), count=1)
        mbarrier.init(note_empty.index(i), count=2)
    fence_async_shared()
    if PDL:  # for all warps: the others start after this
        _asm("griddepcontrol.wait; // $0")
        _asm("griddepcontrol.launch_dependents; // $0")
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                out_ptr, q_parts, k_parts, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                notes, note_full, note_empty, first_head, scale, FIRST, HEADS,
            )),
            (_consume, (
                out_ptr, q_parts, k_parts, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                notes, note_full, note_empty, first_head, scale, SECOND, HEADS,
            )),
            (_produce, (
                q_desc, kv_desc, rows_desc, q_parts, k_parts, v_parts, q_full, q_empty, k_full, k_empty,
                v_full, v_empty, notes, note_full, note_empty, items_ptr, num_items, counter_ptr, heads, section,
                first_head, RANK, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [224, 56],  # their registers; the first consumer gets the rest, 224
    )  # fmt: skip


def takes(rank: int, rope: int, nope: int, value: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is made for such heads, on a device of capability 9.0: keys and values are parts of 64
    columns, and two stages of them fit beside the queries, as a tile's sums do into registers."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and rank % WIDTH == 0
        and rope == WIDTH
        and nope in (WIDTH, 2 * WIDTH)
        and value in (WIDTH, 2 * WIDTH)
    )


def _descriptor(x: torch.Tensor, lines: int) -> TensorDescriptor:
    """Tells the copy engine of x, [lines, columns], to be read in parts of so many lines."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [lines, WIDTH], layout)


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    columns: int,
    rank: int,
    items: torch.Tensor,
    counter: torch.Tensor,
    first_head: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attention of the heads from `first_head` on that kv holds, to out [tokens, heads * value].

    kv [context, heads there * columns]: a head's key without positions, then its value. rows [context, rank + rope].
    items from `prefill_schedule.tiles`, of TOKENS tokens. counter: int32, 0 at first.
    """
    num_tokens, num_heads, width = q.shape
    nope, heads = width - WIDTH, kv.shape[1] // columns
    sections = -(-heads * len(kv) * columns * kv.element_size() // SECTION_BYTES)
    pdl = has_pdl(q.device)
    grid = (min(len(items) * heads, num_processors(q.device)),)
    _latent_prompt_sm90_kernel[grid](
        _descriptor(q.view(num_tokens, num_heads * width), LINES), _descriptor(kv, BLOCK_N),
        _descriptor(rows, BLOCK_N), out, items, len(items), counter, heads, -(-heads // min(sections, heads)),
        first_head, scale * LOG2_E,
        HEADS=num_heads, RANK=rank, NOPE=nope, VALUE=columns - nope, LINES=LINES, BLOCK_N=BLOCK_N, STAGES=STAGES,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
