"""Decode attention over latent rows: one query token a row, or a few at its end, all heads over one row a token.

16 to 128 heads share what is read, so the products decide the shape of a tile. It lies on its side: scores are
[tokens, lines] = rows · queries, sums [rank, lines] = rowsᵀ · weights. So the rows, which are many, are the tall
operand of both products, and the matrix units take them from shared memory as they came, turned for the second: a row
is read from memory once and kept once. The lines, which are few, are the narrow side, where 16 of them are no waste.

A program takes up to 64 of a row's (query, head) lines over one share of its tokens (`decode_schedule`). Up to 32 lines
two programs fit a processor: 32 tokens are 36 KiB a tile, of which each has one on its way while it multiplies another,
so one's softmax, start and end hide behind the other's loads. With 64 lines the sums alone are half of a processor's
registers: one program of 8 warps, with tiles of 64 tokens. 128 lines are two programs beside each other, the second of
which finds the rows in the L2 cache; there the products take about as long as the reading.

Shares of a row are weighed together by a second kernel, a program a line, so that one long row does not wait for one
processor: a share's result is 2 KiB a head.

Where `latent_decode_sm90` has a kernel for the case, that one takes the first one's place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.kernels.attention.triton import decode_schedule, latent_schedule
from quire.kernels.attention.triton.operand import LOG2_E, query_operand
from quire.kernels.triton.launch import (
    dot_width,
    has_gluon_sm90,
    has_pdl,
    next_power_of_2,
    num_processors,
    shared_bytes,
)

if TYPE_CHECKING:
    from quire.kernels.attention.latent_rows import LatentRows

MERGED = 16  # shares that are fetched at once


@triton.jit
def attend(
    acc, top, total, q, q_rope, table, cache_ptr, begin, end, last, block_stride, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One online-softmax pass over tokens [begin, end); line i sees none behind `last[i]`. Scores in units of log 2.

    q [rank, lines], q_rope [rope, lines]; acc [rank, lines], top and total [lines].
    """
    token = tl.arange(0, BLOCK_N)
    column, rotary = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    position = begin + token
    block = tl.load(table + position // BLOCK_SIZE, position < end, 0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + token
        there = (position < end)[:, None]
        row = cache_ptr + (block.to(tl.int64) * block_stride + (position % BLOCK_SIZE) * (RANK + ROPE))[:, None]
        ahead = position + BLOCK_N  # the next tile's blocks are looked up while this tile is on its way
        block = tl.load(table + ahead // BLOCK_SIZE, ahead < end, 0)
        k = tl.load(row + column[None, :], there & (column < RANK)[None, :], 0.0).to(q.dtype)  # [tokens, rank]
        k_rope = tl.load(row + RANK + rotary[None, :], there & (rotary < ROPE)[None, :], 0.0).to(q.dtype)
        s = tl.dot(k_rope, q_rope, tl.dot(k, q)) * scale  # [tokens, lines]
        s = tl.where(there & (position[:, None] <= last[None, :]), s, -1.0e30)  # finite: see `top`
        new_top = tl.maximum(top, tl.max(s, axis=0))
        p = tl.exp2(s - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, axis=0)
        acc = tl.dot(tl.trans(k), p.to(k.dtype), acc * shrink[None, :])
        top = new_top
    return acc, top, total


@triton.jit
def queries(q_ptr, at, there, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr,
            BLOCK_ROPE: tl.constexpr):  # fmt: skip
    """Both parts of lines of q that begin at `at`, [rank, lines] and [rope, lines]."""
    column, rotary = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    q = tl.load(q_ptr + at[None, :] + column[:, None], there[None, :] & (column < RANK)[:, None], 0.0)
    q_rope = tl.load(q_ptr + at[None, :] + RANK + rotary[:, None], there[None, :] & (rotary < ROPE)[:, None], 0.0)
    return q, q_rope


@triton.jit(do_not_specialize_on_alignment=["lse_ptr", "items_ptr"])
def _latent_decode_kernel(
    q_ptr, cache_ptr, out_ptr, partial_ptr, lse_ptr, items_ptr, table_ptr, table_stride, block_stride, scale,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    STAGES: tl.constexpr, ITEM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    LINES: tl.constexpr = HEADS * QUERIES
    item = tl.program_id(1)
    at_item = items_ptr + item * ITEM
    row, seat = tl.load(at_item).to(tl.int64), tl.load(at_item + 1).to(tl.int64)
    begin, end, shares = tl.load(at_item + 2), tl.load(at_item + 3), tl.load(at_item + 5)
    if PDL:  # what is read above is the step's own, made once for all layers
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row < 0:
        return
    line = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    there = line < LINES
    q, q_rope = queries(
        q_ptr, (row * LINES + line) * (RANK + ROPE), there, RANK, ROPE, BLOCK_RANK, BLOCK_ROPE
    )  # fmt: skip
    q, q_rope = query_operand(q, cache_ptr), query_operand(q_rope, cache_ptr)
    last = tl.zeros([BLOCK_L], tl.int32) + end - 1
    if QUERIES > 1:
        last = tl.minimum(last, tl.load(at_item + 7) - 1 + line // HEADS)
    top = tl.full([BLOCK_L], -1.0e30, tl.float32)  # finite: a tile that a line sees nothing of must not make NaN
    total = tl.zeros([BLOCK_L], tl.float32)
    acc = tl.zeros([BLOCK_RANK, BLOCK_L], tl.float32)
    acc, top, total = attend(
        acc, top, total, q, q_rope, table_ptr + seat * table_stride, cache_ptr, begin, end, last, block_stride, scale,
        RANK, ROPE, BLOCK_SIZE, BLOCK_N, BLOCK_RANK, BLOCK_ROPE, STAGES,
    )  # fmt: skip
    column = tl.arange(0, BLOCK_RANK)
    mask = there[:, None] & (column < RANK)[None, :]
    acc = tl.trans(acc / total[None, :])  # [lines, rank]
    if shares == 1:
        out = out_ptr + (row * LINES + line)[:, None] * RANK + column[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask)
        return
    place = item.to(tl.int64) * LINES + line
    tl.store(partial_ptr + place[:, None] * RANK + column[None, :], acc, mask)
    tl.store(lse_ptr + place, top + tl.log2(total), there)


@triton.jit(do_not_specialize_on_alignment=["lse_ptr", "places_ptr"])
def _latent_merge_kernel(
    partial_ptr, lse_ptr, places_ptr, out_ptr, LINES: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Line `program_id(0)` of row `program_id(1)`: its shares, neighbours in the list, weighed by their log-sum-exp."""
    line, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, shares = tl.load(places_ptr + row * 2).to(tl.int64), tl.load(places_ptr + row * 2 + 1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if shares == 1:
        return
    column = tl.arange(0, BLOCK_RANK)
    in_rank = column < RANK
    top, total, acc = -1.0e30, 0.0, tl.zeros([BLOCK_RANK], tl.float32)
    for base in range(0, shares, MERGED):
        share = base + tl.arange(0, MERGED)
        place = (first + share) * LINES + line
        lse = tl.load(lse_ptr + place, share < shares, -1.0e30)
        at = partial_ptr + place[:, None] * RANK + column[None, :]
        part = tl.load(at, (share < shares)[:, None] & in_rank[None, :], 0.0)
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        weight = tl.where(share < shares, tl.exp2(lse - new_top), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink + tl.sum(part * weight[:, None], axis=0)
        top = new_top
    out = out_ptr + (row * LINES + line) * RANK + column
    tl.store(out, (acc / total).to(out_ptr.dtype.element_ty), in_rank)


@dataclass(frozen=True, slots=True)
class Shape:
    """How the kernel is cut. From what shared memory and registers hold; not measured yet."""

    lines: int  # a program
    tokens: int  # a tile
    warps: int
    stages: int
    programs: int  # a processor gets if rows are few
    min_tiles: int  # of a share


def shape(lines: int, width: int, shared: int) -> Shape:
    """For rows of `width` numbers and so many lines a row. shared: bytes of shared memory that a program may have."""
    some = min(max(next_power_of_2(lines), 16), 64)
    if some == 64 and shared >= 2 * (64 + 2 * 64 + 8) * width:
        return Shape(64, 64, 8, 2, 2, 2)
    some = min(some, 32)
    stages = 3 if shared >= 2 * (some + 2 * 32 + 2) * width else 2
    return Shape(some, 32, 4, stages, 3, 4)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Shares of a step: as in `decode_schedule.placed_rows`, or as in `latent_schedule.Pieces`."""

    items: torch.Tensor
    places: torch.Tensor
    queries: int  # of each row
    cut: Shape  # of this file's kernel
    heads: torch.Tensor | None = None  # see `latent_schedule`; None: for this file's kernel


def budget(num_rows: int, lines: int, cut: Shape, processors: int) -> int:
    """Shares beyond one a row: enough that every processor gets `programs`."""
    return max(num_rows // 4, cut.programs * processors // -(-lines // cut.lines), 1)


def workspace_elements(
    max_rows: int, num_heads: int, rank: int, rope: int, device: torch.device, drafted: tuple[int, int]
) -> int:
    """float32 elements for `decode` of any number of rows up to `max_rows`: partial results, and their log-sum-exp.
    drafted: (rows, queries each) of the largest step with several queries."""
    most = 0
    for rows, queries in ((max_rows, 1), drafted):
        lines = num_heads * queries
        beyond = budget(rows, lines, shape(lines, rank + rope, shared_bytes(device)), num_processors(device))
        if queries == 1 and has_gluon_sm90(device):
            from quire.kernels.attention.triton import latent_decode_sm90

            beyond = max(beyond, latent_decode_sm90.programs(lines, device))
        most = max(most, (rows + beyond) * lines if rows else 0)
    return most * (rank + 1)


def schedule(
    seats: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    cached: LatentRows,
    drafted: tuple[int, torch.Tensor] | None = None,
) -> Schedule:
    """See `quire.kernels.attention.latent_paged`."""
    queries, first_lens = (1, None) if drafted is None else drafted
    lines, device = num_heads * queries, seats.device
    cut = shape(lines, cached.rank + cached.rope, shared_bytes(device))
    if drafted is None and has_gluon_sm90(device):
        from quire.kernels.attention.triton import latent_decode_sm90 as sm90

        if sm90.takes(cached):
            programs = sm90.programs(num_heads, device)
            pieces = latent_schedule.pieces(seats, seq_lens, programs, sm90.TOKENS, sm90.MIN_TILES)
            return Schedule(pieces.items, pieces.places, queries, cut, pieces.heads)
    extra = budget(len(seq_lens), lines, cut, num_processors(device))
    items, places = decode_schedule.placed_rows(seats, seq_lens, extra, cut.tokens, cut.min_tiles, first_lens)
    return Schedule(items, places, queries, cut)


def decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    block_table: torch.Tensor,
    plan: Schedule,
    scale: float,
    workspace: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `quire.kernels.attention.latent_paged`."""
    num_queries, num_heads, width = q.shape
    num_rows, lines = num_queries // plan.queries, num_heads * plan.queries
    if not num_rows:
        return out
    places = len(plan.items) * lines
    if workspace.numel() < places * (rank + 1):
        raise ValueError(
            f"decode of {num_rows} rows needs {places * (rank + 1)} workspace elements, got {workspace.numel()}"
        )
    partial, lse = workspace[: places * (rank + 1)].split([places * rank, places])
    pdl, block_rank = has_pdl(q.device), dot_width(rank)
    if plan.heads is not None:
        from quire.kernels.attention.triton import latent_decode_sm90

        latent_decode_sm90.decode(q, cache, rank, block_table, plan.items, plan.heads, scale, partial, lse, out)
    else:
        _latent_decode_kernel[(-(-lines // plan.cut.lines), len(plan.items))](
            q, cache, out, partial, lse, plan.items, block_table, block_table.stride(0), cache.stride(0),
            scale * LOG2_E, HEADS=num_heads, QUERIES=plan.queries, RANK=rank, ROPE=width - rank,
            BLOCK_SIZE=cache.shape[2], BLOCK_L=plan.cut.lines, BLOCK_N=plan.cut.tokens, BLOCK_RANK=block_rank,
            BLOCK_ROPE=dot_width(width - rank), STAGES=plan.cut.stages, ITEM=decode_schedule.ITEM, PDL=pdl,
            num_warps=plan.cut.warps, launch_pdl=pdl,
        )  # fmt: skip
    _latent_merge_kernel[(lines, num_rows)](
        partial, lse, plan.places, out, LINES=lines, RANK=rank, BLOCK_RANK=block_rank, MERGED=MERGED, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
