"""Low-rank products of rows that have an adapter each: shrink (down @ x), then expand (up @ that, into y).

A tile is up to 64 rows of one adapter (`kernels/low_rank/rows.py`), and programs go as far as its adapter's rank. With
few rows a program of shrink takes a share of x's columns, which its warps share again; expand adds up the shares, in
order: no result depends on timing, nor one row's on another's. Where there is Gluon, factors of 16 bits have kernels of
their own (`shrink_registers.py`, `expand_registers.py`, `expand_ring.py`), and tiles are low for any number of rows.

Both are bytes, and little work: with programmatic dependent launch a program has its factors on the way before it waits
for its predecessor. Programs with nothing to do wait too: a kernel that ends ahead of its predecessor would let the
next one start too early.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.low_rank.factors import RANKS_A_STEP, Factors
from quire.kernels.low_rank.rows import HIGH, IN_REGISTERS, AdapterRows, Tiles
from quire.kernels.triton.launch import has_pdl, next_power_of_2


class Shares(NamedTuple):
    """How shrink is cut up. Each of `slices` takes `columns` of x at a time; no more than `splits` programs share x's
    columns."""

    slices: int
    columns: int
    splits: int
    warps: int


class Widths(NamedTuple):
    """Outputs of a program of expand."""

    width: int
    warps: int


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x, down, inner, tile_slots, tile_rows, ranks, num_rows, k, stride, LINES: tl.constexpr, ROOM: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tile_slots + tile)
    rows = tl.load(tile_rows + tile * HEIGHT + tl.arange(0, HEIGHT))
    adapter = tl.maximum(slot - 1, 0)
    rank = tl.where(slot > 0, tl.load(ranks + 2 * adapter), 0) - block * WIDTH % ROOM
    live = rows >= 0
    at = tl.where(live, rows, 0).to(tl.int64)
    line = tl.arange(0, WIDTH)
    in_rank = line < rank
    lines = block * WIDTH + line
    STEP: tl.constexpr = SLICES * COLUMNS
    share = tl.cdiv(tl.cdiv(k, STEP), SPLITS) * STEP
    begin = split * share
    end = tl.minimum(begin + share, k)
    weights = down + (adapter.to(tl.int64) * LINES + lines.to(tl.int64)) * k
    if SLICES == 1:
        columns = begin + tl.arange(0, COLUMNS)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        if rank <= 0:
            return
        total = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
        for _ in range(begin, end, COLUMNS):
            a = tl.load(x + at[:, None] * stride + columns[None, :], live[:, None] & (columns < end)[None, :], 0.0)
            b = tl.load(weights[:, None] + columns[None, :], in_rank[:, None] & (columns < end)[None, :], 0.0)
            total = tl.dot(a.to(b.dtype), b.trans(), total, input_precision=PRECISION)
            columns += COLUMNS
    else:
        columns = begin + tl.arange(0, SLICES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        places = weights[None, :, None] + columns[:, None, :]
        b = tl.load(places, in_rank[None, :, None] & (columns < end)[:, None, :], 0.0)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        if rank <= 0:
            return
        sums = tl.zeros((SLICES, HEIGHT, WIDTH), dtype=tl.float32)
        for _ in range(begin, end, STEP):
            inside = (columns < end)[:, None, :]
            a = tl.load(x + at[None, :, None] * stride + columns[:, None, :], live[None, :, None] & inside, 0.0)
            now = b
            columns += STEP
            places += STEP
            b = tl.load(places, in_rank[None, :, None] & (columns < end)[:, None, :], 0.0)
            sums = tl.dot(a.to(b.dtype), tl.permute(now, (0, 2, 1)), sums, input_precision=PRECISION)
        total = tl.sum(sums, axis=0)
    place = inner + (split * num_rows + at[:, None]) * LINES + lines[None, :]
    tl.store(place, total, live[:, None] & in_rank[None, :])


@triton.jit
def _edge(place, ALIGNED: tl.constexpr):
    """Where a part begins or ends; the compiler cannot know that outputs may be read many at a time."""
    edge = tl.load(place)
    return tl.multiple_of(edge, 16) if ALIGNED else edge


@triton.jit
def _shrunk(place, mask, split_stride, SPLITS: tl.constexpr, ROOM_FOR: tl.constexpr):
    """The sum of the shares. One load has them all: added one by one, each would change threads by itself."""
    split = tl.arange(0, ROOM_FOR)
    there = mask[None, :, :] & (split < SPLITS)[:, None, None]
    return tl.sum(tl.load(place[None, :, :] + (split * split_stride)[:, None, None], there, 0.0), axis=0)


@triton.jit
def _scaled(own, has_gains, gains, bias, outputs, inside, HAS_BIAS: tl.constexpr):
    """A product by an adapter's gains, but for its bias, float32 [rows, outputs]."""
    if has_gains:
        gain = tl.load(gains + outputs, inside, 1.0)
        own *= gain[None, :]
        if HAS_BIAS:
            own += (tl.load(bias + outputs, inside, 0.0).to(tl.float32) * (1.0 - gain))[None, :]
    return own


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    y, inner, out, up, gains, bias, tile_slots, tile_rows, ranks, edges, num_rows, n, stride, out_stride,
    LINES: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, SPLITS: tl.constexpr, ROOM_FOR: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tile_slots + tile)
    rows = tl.load(tile_rows + tile * HEIGHT + tl.arange(0, HEIGHT))
    first, end, part = block * WIDTH, _edge(edges + 1, ALIGNED), 0
    half = end
    if not GATED:
        blocks = tl.cdiv(end, WIDTH)  # of the parts before
        for i in tl.static_range(1, PARTS):
            edge, after = _edge(edges + i, ALIGNED), _edge(edges + i + 1, ALIGNED)
            is_in = block >= blocks
            first = tl.where(is_in, edge + (block - blocks) * WIDTH, first)
            end = tl.where(is_in, after, end)
            part = tl.where(is_in, i, part)
            blocks += tl.cdiv(after - edge, WIDTH)
    adapter = tl.maximum(slot - 1, 0)
    rank = tl.where(slot > 0, tl.load(ranks + 2 * adapter), 0)
    has_gains = (rank > 0) & (tl.load(ranks + 2 * adapter + 1) > 0)
    gains += adapter.to(tl.int64) * n
    live = rows >= 0
    at = tl.where(live, rows, 0).to(tl.int64)
    outputs, steps = first + tl.arange(0, WIDTH), tl.arange(0, STEP)
    inside = outputs < end
    places = up + (adapter.to(tl.int64) * ROOM + steps)[:, None] * n + outputs[None, :]
    b = tl.load(places, (steps < rank)[:, None] & inside[None, :], 0.0)
    if GATED:
        b_up = tl.load(places + half, (steps < rank)[:, None] & inside[None, :], 0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if slot < 0 if GATED or RESIDUAL else rank == 0:
        return

    mask = live[:, None] & inside[None, :]
    old_at = y + at[:, None] * stride + outputs[None, :]
    old = tl.load(old_at, mask, 0.0)
    if GATED:
        old_up = tl.load(old_at + half, mask, 0.0)
    out_at = out + at[:, None] * out_stride + outputs[None, :]
    if RESIDUAL:
        rest = tl.load(out_at, mask, 0.0)
    place = inner + at[:, None] * LINES + part * ROOM + steps[None, :]
    split_stride = num_rows.to(tl.int64) * LINES
    there = live[:, None] & (steps < rank)[None, :]
    a = _shrunk(place, there, split_stride, SPLITS, ROOM_FOR).to(b.dtype)
    total = tl.dot(a, b, input_precision=PRECISION)
    if GATED:
        a = _shrunk(place + ROOM, there, split_stride, SPLITS, ROOM_FOR).to(b.dtype)
        total_up = tl.dot(a, b_up, input_precision=PRECISION)
    if ROOM > STEP:
        for begin in range(STEP, rank, STEP):
            there = live[:, None] & (begin + steps < rank)[None, :]
            more = (begin + steps < rank)[:, None] & inside[None, :]
            a = _shrunk(place + begin, there, split_stride, SPLITS, ROOM_FOR).to(b.dtype)
            b = tl.load(places + begin * n, more, 0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            if GATED:
                a = _shrunk(place + ROOM + begin, there, split_stride, SPLITS, ROOM_FOR).to(b.dtype)
                b = tl.load(places + begin * n + half, more, 0.0)
                total_up = tl.dot(a, b, total_up, input_precision=PRECISION)
    own = _scaled(old.to(tl.float32), has_gains, gains, bias, outputs, inside, HAS_BIAS) + total
    if GATED:
        own_up = _scaled(old_up.to(tl.float32), has_gains, gains, bias, half + outputs, inside, HAS_BIAS) + total_up
        own = own * tl.sigmoid(own) * own_up
    if RESIDUAL:
        own += rest.to(tl.float32)
    tl.store(out_at, own.to(out.dtype.element_ty), mask)


def shrink(x: torch.Tensor, rows: AdapterRows, factors: Factors) -> torch.Tensor:
    """x [rows, k] → float32 [splits, rows, parts * room]; see `quire.kernels.low_rank.product`."""
    tiles = rows.tiles
    assert tiles is not None
    if in_registers(tiles, factors):
        from quire.kernels.low_rank.triton import shrink_registers

        return shrink_registers.shrink(x, rows, factors)
    lines, k = factors.down.shape[1:]
    height, narrow = tiles.rows.shape[1], factors.down.dtype != torch.float32
    slices, columns, most, warps = _shares(height, narrow=narrow)
    steps = -(-k // (slices * columns))
    splits = -(-steps // -(-steps // most))
    inner = torch.empty((splits, len(x), lines), dtype=torch.float32, device=x.device)
    pdl = has_pdl(x.device)
    if len(x):
        _shrink_kernel[(lines // RANKS_A_STEP, splits, len(tiles.slots))](
            x, factors.down, inner, tiles.slots, tiles.rows, factors.ranks, len(x), k, x.stride(0), LINES=lines,
            ROOM=factors.room, HEIGHT=height, WIDTH=RANKS_A_STEP, SLICES=slices, COLUMNS=columns, SPLITS=splits,
            PRECISION="tf32" if narrow else "ieee", PDL=pdl, num_warps=warps,
            num_stages=3 if slices == 1 else 1, launch_pdl=pdl,
        )  # fmt: skip
    return inner


def expand(
    y: torch.Tensor,
    inner: torch.Tensor,
    rows: AdapterRows,
    factors: Factors,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    reader: Factors | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """inner [splits, rows, parts * room] → y [rows, n], or what follows; and what the reader's first factor makes of
    that, or None. See `quire.kernels.low_rank.product`."""
    tiles = rows.tiles
    assert tiles is not None
    assert y.stride(1) == 1
    assert inner.is_contiguous()
    if in_registers(tiles, factors):
        from quire.kernels.low_rank.triton import expand_registers, expand_ring

        blocks = expand_ring.num_blocks(y, rows, factors, gated=gated)
        if blocks > 1:
            return expand_ring.expand(y, inner, rows, factors, bias, gated, residual, reader, blocks)
        return expand_registers.expand(y, inner, rows, factors, bias, gated, residual), None
    splits, num_rows, lines = inner.shape
    n, ends = y.shape[1], factors.ends
    out = y if residual is None else residual
    if gated:
        out, ends = torch.empty((num_rows, n // 2), dtype=y.dtype, device=y.device), ends[:1]
    height, count = tiles.rows.shape[1], len(tiles.slots)
    width, warps = _widths(height, count, gated=gated)
    blocks = sum(-(-(end - begin) // width) for begin, end in zip((0, *ends[:-1]), ends, strict=True))
    pdl = has_pdl(y.device)
    if num_rows:
        _expand_kernel[(blocks, count)](
            y, inner, out, factors.up, factors.gains, y if bias is None else bias, tiles.slots, tiles.rows,
            factors.ranks, factors.edges, num_rows, n, y.stride(0), out.stride(0), LINES=lines, ROOM=factors.room,
            PARTS=len(factors.ends), HEIGHT=height, WIDTH=width, STEP=RANKS_A_STEP, SPLITS=splits,
            ROOM_FOR=next_power_of_2(splits), HAS_BIAS=bias is not None, GATED=gated, RESIDUAL=residual is not None,
            ALIGNED=not any(end % 16 for end in factors.ends), PDL=pdl, num_warps=warps, num_stages=1,
            PRECISION="ieee" if factors.up.dtype == torch.float32 else "tf32", launch_pdl=pdl,
        )  # fmt: skip
    return out, None


def in_registers(tiles: Tiles, factors: Factors) -> bool:
    """Whether the kernels that keep tiles in registers take it."""
    return tiles.rows.shape[1] == IN_REGISTERS and factors.up.dtype != torch.float32 and len(factors.ends) <= 3


def _shares(height: int, *, narrow: bool) -> Shares:
    """The same for any few rows, so that a row's sums are the same in all of them."""
    if height == HIGH:
        return Shares(1, 64, 1, 4)
    return Shares(4, 128 if narrow else 16, 8, 4)  # three programs fit a processor: many adapters are many of them


def _widths(height: int, tiles: int, *, gated: bool) -> Widths:
    """Few tiles are cut up finely, so that all processors have something to do."""
    if height == HIGH:
        return Widths(64 if gated else 128, 4)
    if tiles <= 4:
        return Widths(64, 4)
    return Widths(128 if gated else 256, 4)
