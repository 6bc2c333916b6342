"""Attention of one query token a row, or of a few at its end, over the paged cache: flash decoding with split KV.

A program serves all query heads of one KV head (so K and V are read once) and all of a row's queries over one share of
its tokens, each head of each query a line of the tile; the list
of shares is made once a step (`decode_schedule`). The program that finishes a row's head last merges its shares by
log-sum-exp (Dao et al., Flash-Decoding, 2023): a counter a row and KV head, set back to zero by the one who merges,
tells who that is. What rows share is read once for all of them by `decode_prefix`; the program of a row's first share
takes those results in.

Keys and values of all tokens but the newest were written steps ago, so a program asks for its first tiles before it
waits for the predecessor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.attention.scores import ALIKE, PLAIN, PerHead, Scores
from quire.kernels.attention.triton import decode_prefix, decode_schedule
from quire.kernels.attention.triton.operand import (
    LOG2_E,
    cap,
    first_seen,
    float8_pairs,
    in_log2,
    pointers,
    query_operand,
    softcapped,
)
from quire.kernels.triton.launch import dot_width, has_pdl, next_power_of_2, num_processors, shared_bytes


@triton.jit
def _add_shares(
    acc, top, total, partial_ptr, lse_ptr, line, step, shares, mask, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DIM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Results of one KV head's queries, in lines `line + member` and every `step` from there, added to a running one.

    CHUNK of them are on their way at once. A thread keeps to its own columns, so nothing is exchanged between threads.
    """
    member = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_DIM)
    for base in range(0, shares, CHUNK):
        lses, parts = (), ()
        for share in tl.static_range(CHUNK):
            there = base + share < shares
            at = line + (base + share) * step + member
            # Not through the L1 cache: other processors wrote this a moment ago.
            lse = tl.load(lse_ptr + at, there & (member < GROUP), -1.0e30, cache_modifier=".cg")
            at_part = partial_ptr + at[:, None] * DIM + column[None, :]
            part = tl.load(at_part, there & mask, 0.0, cache_modifier=".cg")
            lses, parts = lses + (lse,), parts + (part,)  # noqa: RUF005 (the compiler knows no other way)
        new_top = top
        for share in tl.static_range(CHUNK):
            new_top = tl.maximum(new_top, lses[share])
        shrink = tl.exp2(top - new_top)
        total, acc, top = total * shrink, acc * shrink[:, None], new_top
        for share in tl.static_range(CHUNK):
            weight = tl.exp2(lses[share] - new_top)
            total += weight
            acc += parts[share] * weight[:, None]
    return acc, top, total


@triton.jit
def _merge(
    partial_ptr, lse_ptr, out_ptr, first_line, out_line, shares, HEADS: tl.constexpr, QUERIES: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The shares of one KV head's queries weighed together."""
    LINES: tl.constexpr = GROUP * QUERIES
    member = tl.arange(0, BLOCK_GROUP)
    column = tl.arange(0, BLOCK_DIM)
    mask = (member < LINES)[:, None] & (column < DIM)[None, :]
    top = tl.full([BLOCK_GROUP], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    acc, top, total = _add_shares(
        acc, top, total, partial_ptr, lse_ptr, first_line, LINES, shares, mask, LINES, DIM, BLOCK_GROUP, BLOCK_DIM,
        CHUNK,
    )  # fmt: skip
    if QUERIES > 1:
        member = member // GROUP * HEADS + member % GROUP
    out = out_ptr + (out_line + member)[:, None] * DIM + column[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask)


@triton.jit(
    do_not_specialize_on_alignment=[
        "lse_ptr", "counter_ptr", "items_ptr", "prefix_partial_ptr", "prefix_lse_ptr", "row_prefix_ptr",
    ]
)  # fmt: skip
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, counter_ptr, prefix_partial_ptr, prefix_lse_ptr,
    row_prefix_ptr, items_ptr, table_ptr, sinks_ptr, slopes_ptr, q_stride, table_stride, block_stride, head_stride,
    scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, ITEM: tl.constexpr, PREFIX: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr, QUERIES: tl.constexpr, SOFTCAP: tl.constexpr, CHUNKED: tl.constexpr,
    SINKS: tl.constexpr, SLOPES: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = HEADS // GROUP
    LINES: tl.constexpr = GROUP * QUERIES
    kv_head, item = tl.program_id(0), tl.program_id(1)
    member = tl.arange(0, BLOCK_M)  # query heads of this KV head, query after query
    token = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_DIM)
    at_item = items_ptr + item * ITEM
    row, seat = tl.load(at_item).to(tl.int64), tl.load(at_item + 1).to(tl.int64)
    begin, end = tl.load(at_item + 2), tl.load(at_item + 3)
    share, shares, seen_from = tl.load(at_item + 4), tl.load(at_item + 5), tl.load(at_item + 6)
    if row < 0:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        return
    table = table_ptr + seat * table_stride
    k_head, v_head = k_ptr + kv_head.to(tl.int64) * head_stride, v_ptr + kv_head.to(tl.int64) * head_stride
    position = begin + token
    block = tl.load(table + position // BLOCK_SIZE, position < end, 0)
    if PREFIX:  # the program of the first share takes in what was found in the shared tokens
        at_prefix = row_prefix_ptr + row * 4
        place, step = tl.load(at_prefix).to(tl.int64), tl.load(at_prefix + 1)
        prefix_shares = tl.where(share == 0, tl.load(at_prefix + 2), 0)

    head = kv_head * GROUP + member
    mask = (member < LINES)[:, None] & (column < DIM)[None, :]
    at_q = q_ptr + row * q_stride + head[:, None] * DIM + column[None, :]
    if QUERIES > 1:
        query = member // GROUP
        head = kv_head * GROUP + member % GROUP
        at_q = q_ptr + (row * QUERIES + query)[:, None] * q_stride + head[:, None] * DIM + column[None, :]
        first_len = tl.load(at_item + 7)  # tokens that the first query sees
    if SLOPES:
        slope = in_log2(tl.load(slopes_ptr + head, member < LINES, 0.0))
        own = tl.load(at_item + 7) - 1 + member // GROUP  # the query's own token
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        # The compiler moves the loads of the loop's first STAGES - 1 tiles ahead of it, and so of the wait in its first
        # round. That is wrong for one token alone, the row's newest, which the predecessor writes: if it is as near as
        # that to the beginning of its share, the wait comes first.
        # Of several queries each has such a token, and they may begin in the share before the last.
        is_near = (share == shares - 1) & (end - begin <= STAGES * BLOCK_N)
        if QUERIES > 1:
            is_near = (end >= first_len) & (first_len - begin <= STAGES * BLOCK_N)
        if is_near:
            tl.extra.cuda.gdc_wait()
        q = query_operand(tl.zeros([BLOCK_M, BLOCK_DIM], q_ptr.dtype.element_ty), k_ptr)
    else:
        if PDL and not PREFIX:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        q = query_operand(tl.load(at_q, mask, 0.0, cache_modifier=".cg"), k_ptr)  # [heads, dim]
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)  # finite: a wholly masked tile must not make NaN
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # the first share's: a score without a value
        has_sink = (member < LINES) & (share == 0)
        top = tl.where(has_sink, in_log2(tl.load(sinks_ptr + head, has_sink, 0.0)), -1.0e30)
        total = tl.where(has_sink, 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DIM // 2 if PAIRS else BLOCK_DIM], tl.float32)
    if PAIRS:
        acc_odd = acc  # of every second column
        pair = tl.arange(0, BLOCK_DIM // 2)
        v_pairs = v_head.to(tl.pointer_type(tl.int16))
    inner = ((token % BLOCK_SIZE) * DIM)[:, None] + column[None, :]  # place within a block
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + token
        seen = position < end
        if WINDOW > 0:  # what lies before may have been given back, and be anything by now
            seen = seen & (position >= seen_from)
        inside = seen[:, None] & (column < DIM)[None, :]
        if BLOCK_SIZE > BLOCK_N:
            inner = ((position % BLOCK_SIZE) * DIM)[:, None] + column[None, :]
        at_block = block.to(tl.int64)
        at = (at_block * block_stride)[:, None] + inner
        ahead = position + BLOCK_N  # the next tile's blocks are looked up while this tile is on its way
        block = tl.load(table + ahead // BLOCK_SIZE, ahead < end, 0)
        k = tl.load(k_head + at, inside, 0.0).to(q.dtype)  # [tokens, dim]
        if EARLY:  # noqa: SIM102
            if start == begin:
                tl.extra.cuda.gdc_wait()
                q = query_operand(tl.load(at_q, mask, 0.0, cache_modifier=".cg"), k_ptr)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP > 0:
            s = softcapped(s, SOFTCAP)
        if SLOPES:
            s += slope[:, None] * (position[None, :] - own[:, None]).to(tl.float32)
        if QUERIES > 1:
            visible = position[None, :] < tl.minimum(end, first_len + query)[:, None]
            if WINDOW > 0:
                visible = visible & (position[None, :] >= first_seen(first_len + query - 1, WINDOW, CHUNKED)[:, None])
            s = tl.where(visible, s, -1.0e30)
        else:
            s = tl.where(seen[None, :], s, -1.0e30)
        new_top = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=1)
        if PAIRS:
            at = (at_block * (block_stride // 2) + position % BLOCK_SIZE * (DIM // 2))[:, None] + pair[None, :]
            words = tl.load(v_pairs + at, seen[:, None] & (pair < DIM // 2)[None, :], 0)
            even, odd = float8_pairs(words, v_ptr.dtype.element_ty == tl.float8e5)
            acc = tl.dot(p.to(q.dtype), even, acc * shrink[:, None])
            acc_odd = tl.dot(p.to(q.dtype), odd, acc_odd * shrink[:, None])
        else:
            v = tl.load(v_head + at, inside, 0.0).to(q.dtype)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    if PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_DIM])

    if PREFIX:
        if PDL:
            # The predecessor is `decode_prefix`, which waited for q and the new KV before it let this kernel start.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        acc, top, total = _add_shares(
            acc, top, total, prefix_partial_ptr, prefix_lse_ptr, (place * KV_HEADS + kv_head) * GROUP,
            step * (KV_HEADS * GROUP), prefix_shares, mask, GROUP, DIM, BLOCK_M, BLOCK_DIM, 2,
        )  # fmt: skip
    acc = acc / total[:, None]
    if shares == 1:
        out = out_ptr + (row * HEADS + head[:, None]) * DIM + column[None, :]
        if QUERIES > 1:
            out = out_ptr + ((row * QUERIES + query)[:, None] * HEADS + head[:, None]) * DIM + column[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask)
        return
    # A row's shares are neighbours, the heads of one share too.
    first_line = (kv_head * tl.num_programs(1) + item - share).to(tl.int64) * LINES
    line = first_line + share * LINES + member
    tl.store(partial_ptr + line[:, None] * DIM + column[None, :], acc, mask)
    tl.store(lse_ptr + line, top + tl.log2(total), member < LINES)
    tl.debug_barrier()  # every thread's part is written before one of them says so
    counter = counter_ptr + row * KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == shares - 1:
        tl.store(counter, 0)
        _merge(
            partial_ptr, lse_ptr, out_ptr, first_line, row * (QUERIES * HEADS) + kv_head * GROUP, shares, HEADS,
            QUERIES, GROUP, DIM, BLOCK_GROUP, BLOCK_DIM, CHUNK,
        )  # fmt: skip


# KV heads of rows, a processor, by a head's width: of so many programs what each takes to begin and to end counts.
MANY_ROWS = {64: 3.5, 128: 48, 256: 0.9}
FEW_ROWS = {64: 2.0, 128: 0.75}  # up to which fewer shares, of tiles twice as long, are to be added up
LONG_TILES_BYTES = 128 * 1024  # of shared memory, where three of these are on their way
TWO_WARPS = 16 * 256  # sums, which they have registers for
# As many nearly fill the four programs that run at once on a processor. Cut a little, some begin when the others end,
# with as much to do: so they are cut into about twice as many, and what is left for the end is short.
ONE_ROUND = (2.3, 3.6)


@dataclass(frozen=True, slots=True)
class Shape:
    """How the kernel is cut for a head's width, as measured on an H200."""

    tokens: int  # a tile
    warps: int
    stages: int
    programs: int  # a processor gets if rows are not many
    min_tiles: int  # of a share
    lines: int  # fetched at once when shares are merged


def shape(head_dim: int, element_size: int, lines: int, rows: float, shared: int) -> Shape:
    """lines: queries of a KV head. rows: KV heads of them, a processor. shared: bytes of its memory."""
    # A K tile of 8 KiB, or two: several programs fit a processor and hide each other's latency.
    width = dot_width(head_dim)
    tokens = max(8192 // (width * element_size), 16)
    if element_size == 1:
        return Shape(tokens, 2, 3, 3, 1, 32)
    if element_size == 2 and rows <= FEW_ROWS.get(width, 0) and lines <= 16 and shared >= LONG_TILES_BYTES:
        return Shape(2 * tokens, 4, 3, 3, 1, 32)
    if width in MANY_ROWS and rows >= MANY_ROWS[width] and max(lines, 16) * width <= TWO_WARPS:
        return Shape(max(tokens // 2, 16), 2, 4 if width == 128 else 3, 3, 1, 32)
    is_one_round = element_size == 2 and width == 128 and ONE_ROUND[0] <= rows < ONE_ROUND[1]
    return Shape(tokens, 4, 3, 6 if is_one_round else 3, 1, 32)


@dataclass(frozen=True, slots=True)
class PrefixSchedule:
    """Shares of common prefixes; see `decode_schedule.prefixes`."""

    items: torch.Tensor
    count: torch.Tensor
    row_prefix: torch.Tensor
    members: torch.Tensor
    programs: int  # a KV head
    tile_rows: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Shares of a step; see `decode_schedule.rows`."""

    items: torch.Tensor
    prefix: PrefixSchedule | None
    queries: int = 1  # of each row


def budget(num_rows: int, num_kv_heads: int, processors: int, programs: int) -> int:
    """Shares beyond one a row: enough that every processor gets `programs`, and that none of many rows takes much
    longer than twice the mean."""
    return max(num_rows // 2, programs * processors // num_kv_heads, 1)


def workspace_elements(
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    processors: int,
    drafted: tuple[int, int] = (0, 1),
) -> int:
    """float32 elements for `decode` of any number of rows up to `max_rows`: partial results, then counters. drafted:
    (rows, queries each) of the largest step with several queries."""
    group = num_heads // num_kv_heads
    programs = max(shape(head_dim, 2, group, rows, 0).programs for rows in (0, *ONE_ROUND))  # the most of all dtypes
    places = max_rows + budget(max_rows, num_kv_heads, processors, programs)
    if drafted[0]:
        places = max(places, drafted[1] * (drafted[0] + budget(drafted[0], num_kv_heads, processors, programs)))
    programs = decode_prefix.programs(num_kv_heads, processors, decode_prefix.shape(head_dim, 2, group).programs)
    places += decode_prefix.places(max_rows, decode_prefix.lines(group) // group, programs)
    return places * num_heads * (head_dim + 1) + max_rows * num_kv_heads


def schedule(
    seats: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_size: int,
    scores: Scores = PLAIN,
    prefix: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    cut: Shape | None = None,
    wide: decode_prefix.PrefixShape | None = None,
    drafted: tuple[int, torch.Tensor] | None = None,
) -> Schedule:
    """See `quire.kernels.attention.paged`; `cut` and `wide` are for measuring."""
    group, processors = num_heads // num_kv_heads, num_processors(seq_lens.device)
    lines = group * (drafted[0] if drafted is not None else 1)
    rows = len(seq_lens) * num_kv_heads / processors
    cut = cut or shape(head_dim, element_size, lines, rows, shared_bytes(seq_lens.device))
    extra = budget(len(seq_lens), num_kv_heads, processors, cut.programs)
    if drafted is not None:
        queries, first_lens = drafted
        items, _ = decode_schedule.rows(seats, seq_lens, None, extra, cut.tokens, cut.min_tiles, scores, first_lens)
        return Schedule(items, None, queries)
    # A window may begin within a prefix, and what tokens get by their distance differs by row.
    if prefix is None or scores.window or scores.slopes or not len(prefix[2]):
        items, _ = decode_schedule.rows(seats, seq_lens, None, extra, cut.tokens, cut.min_tiles, scores)
        return Schedule(items, None)
    shared, members, tiles = prefix
    items, row_prefix = decode_schedule.rows(seats, seq_lens, shared, extra, cut.tokens, cut.min_tiles, scores)
    assert row_prefix is not None
    wide = wide or decode_prefix.shape(head_dim, element_size, group)
    programs = decode_prefix.programs(num_kv_heads, processors, wide.programs)
    tile_rows = wide.lines // group
    prefix_items, count = decode_schedule.prefixes(
        tiles, members, row_prefix, programs, tile_rows, wide.tokens, wide.min_tiles
    )
    return Schedule(items, PrefixSchedule(prefix_items, count, row_prefix, members, programs, tile_rows))


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: Schedule,
    scale: float,
    workspace: torch.Tensor,
    scores: Scores = PLAIN,
    heads: PerHead = ALIKE,
    out: torch.Tensor | None = None,
    cut: Shape | None = None,
    wide: decode_prefix.PrefixShape | None = None,
) -> torch.Tensor:
    """See `quire.kernels.attention.paged`; `cut` and `wide` are for measuring."""
    num_queries, num_heads, dim = q.shape
    num_rows = num_queries // plan.queries
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    if out is None:
        out = torch.empty((num_queries, num_heads * dim), dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    group, prefix = num_heads // num_kv_heads, plan.prefix
    rows = num_rows * num_kv_heads / num_processors(q.device)
    cut = cut or shape(dim, k_cache.element_size(), group * plan.queries, rows, shared_bytes(q.device))
    lines, counters = len(plan.items) * num_heads * plan.queries, num_rows * num_kv_heads
    prefix_lines = decode_prefix.places(num_rows, prefix.tile_rows, prefix.programs) * num_heads if prefix else 0
    needed = (lines + prefix_lines) * (dim + 1) + counters
    if workspace.numel() < needed:
        raise ValueError(f"decode of {num_rows} rows needs {needed} workspace elements, got {workspace.numel()}")
    partial, lse, prefix_partial, prefix_lse = workspace[: needed - counters].split(
        [lines * dim, lines, prefix_lines * dim, prefix_lines]
    )
    if prefix:
        decode_prefix.attend(
            q, k_cache, v_cache, block_table, prefix.items, prefix.count, prefix.members, scale * LOG2_E,
            prefix_partial, prefix_lse, prefix.programs,
            wide or decode_prefix.shape(dim, k_cache.element_size(), group), scores.softcap,
        )  # fmt: skip
    pdl = has_pdl(q.device)
    block_group = next_power_of_2(group * plan.queries)
    sinks, slopes = pointers(scores, heads, q)
    _decode_kernel[(num_kv_heads, len(plan.items))](
        q, k_cache, v_cache, out, partial, lse, workspace.view(torch.int32)[-counters:], prefix_partial, prefix_lse,
        prefix.row_prefix if prefix else plan.items, plan.items, block_table, sinks, slopes, q.stride(0),
        block_table.stride(0), k_cache.stride(0), k_cache.stride(1), scale * LOG2_E, HEADS=num_heads, GROUP=group,
        DIM=dim, BLOCK_SIZE=block_size, WINDOW=scores.window, BLOCK_M=max(block_group, 16), BLOCK_N=cut.tokens,
        BLOCK_GROUP=block_group, BLOCK_DIM=dot_width(dim), CHUNK=max(cut.lines // block_group, 1), STAGES=cut.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", ITEM=decode_schedule.ITEM, PREFIX=prefix is not None,
        EARLY=pdl and prefix is None and q.element_size() == 2, PDL=pdl, QUERIES=plan.queries,
        SOFTCAP=cap(scores.softcap), CHUNKED=scores.chunked, SINKS=scores.sinks, SLOPES=scores.slopes,
        PAIRS=pdl and v_cache.element_size() == 1 and dim % 2 == 0, num_warps=cut.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
