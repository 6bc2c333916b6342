"""Low-rank products of rows that have an adapter each: shrink (down @ x), then expand (up @ that, into y).

A tile is up to 64 rows of one adapter (`kernels/low_rank/rows.py`). Programs of empty tiles, and of adapters that leave
the matrix alone, end at once; the others go as far as their adapter's rank. With few tiles the columns of x are split
among programs, whose parts `expand` adds up in order: no result depends on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.low_rank.factors import OUTPUTS_A_BLOCK, RANKS_A_STEP, Factors
from quire.kernels.low_rank.rows import AdapterRows

_COLUMNS = 64  # of x at a time
_FEW_TILES = 64
_SPLITS = 4
_LONG = 1024  # columns from which on they are split


@triton.jit
def _shrink_kernel(
    x, down, inner, tile_slots, tile_rows, ranks, num_rows, k, stride, LINES: tl.constexpr, ROOM: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tile_slots + tile)
    if slot == 0:
        return
    first = block * WIDTH
    if first % ROOM >= tl.load(ranks + slot - 1):
        return
    rows = tl.load(tile_rows + tile * HEIGHT + tl.arange(0, HEIGHT))
    live = rows >= 0
    at = tl.where(live, rows, 0).to(tl.int64)
    lines = first + tl.arange(0, WIDTH)
    weights = down + ((slot - 1).to(tl.int64) * LINES + lines.to(tl.int64)) * k
    share = tl.cdiv(tl.cdiv(k, COLUMNS), SPLITS) * COLUMNS
    total = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for begin in range(split * share, tl.minimum((split + 1) * share, k), COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        inside = columns < k
        a = tl.load(x + at[:, None] * stride + columns[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        b = tl.load(weights[:, None] + columns[None, :], mask=inside[None, :], other=0.0)
        total = tl.dot(a.to(b.dtype), b.trans(), total, input_precision=PRECISION)
    place = inner + (split * num_rows + at[:, None]) * LINES + lines[None, :]
    tl.store(place, total, mask=live[:, None])


@triton.jit
def _expand_kernel(
    y, inner, up, gains, bias, tile_slots, tile_rows, ranks, blocks, num_rows, n, stride, LINES: tl.constexpr,
    ROOM: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tile_slots + tile)
    if slot == 0:
        return
    rank = tl.load(ranks + slot - 1)
    if rank == 0:
        return
    rows = tl.load(tile_rows + tile * HEIGHT + tl.arange(0, HEIGHT))
    live = rows >= 0
    at = tl.where(live, rows, 0).to(tl.int64)
    first, end, part = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    outputs = first + tl.arange(0, WIDTH)
    inside = outputs < end
    lines = (slot - 1).to(tl.int64) * n + outputs.to(tl.int64)
    total = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for begin in range(0, rank, STEP):
        steps = begin + tl.arange(0, STEP)
        a = tl.zeros((HEIGHT, STEP), dtype=tl.float32)
        for split in range(SPLITS):
            place = inner + (split * num_rows + at[:, None]) * LINES + part * ROOM + steps[None, :]
            a += tl.load(place, mask=live[:, None], other=0.0)
        b = tl.load(up + lines[:, None] * ROOM + steps[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(a.to(b.dtype), b.trans(), total, input_precision=PRECISION)
    gain = tl.load(gains + lines, mask=inside, other=1.0)
    mask = live[:, None] & inside[None, :]
    own = tl.load(y + at[:, None] * stride + outputs[None, :], mask=mask, other=0.0).to(tl.float32)
    own = own * gain[None, :] + total
    if HAS_BIAS:
        shift = tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32) * (1.0 - gain)
        own += shift[None, :]
    tl.store(y + at[:, None] * stride + outputs[None, :], own.to(y.dtype.element_ty), mask=mask)


def shrink(x: torch.Tensor, rows: AdapterRows, factors: Factors) -> torch.Tensor:
    """x [rows, k] → float32 [splits, rows, parts * room], to be added up; only as far as ranks go, and only of rows
    with an adapter."""
    tiles = rows.tiles
    assert tiles is not None
    lines, k = factors.down.shape[1:]
    splits = _SPLITS if k >= _LONG and len(tiles.slots) <= _FEW_TILES else 1
    inner = torch.empty((splits, len(x), lines), dtype=torch.float32, device=x.device)
    _shrink_kernel[(len(tiles.slots), lines // RANKS_A_STEP, splits)](
        x, factors.down, inner, tiles.slots, tiles.rows, factors.ranks, len(x), k, x.stride(0), LINES=lines,
        ROOM=factors.room, HEIGHT=tiles.rows.shape[1], WIDTH=RANKS_A_STEP, COLUMNS=_COLUMNS, SPLITS=splits,
        PRECISION=_precision(factors.down),
    )  # fmt: skip
    return inner


def expand(
    y: torch.Tensor, inner: torch.Tensor, rows: AdapterRows, factors: Factors, bias: torch.Tensor | None
) -> torch.Tensor:
    """inner float32 [splits, rows, parts * room] → y [rows, n], in place."""
    tiles = rows.tiles
    assert tiles is not None
    assert y.stride(1) == 1
    splits, num_rows, lines = inner.shape
    _expand_kernel[(len(tiles.slots), len(factors.blocks))](
        y, inner, factors.up, factors.gains, y if bias is None else bias, tiles.slots, tiles.rows, factors.ranks,
        factors.blocks, num_rows, factors.up.shape[1], y.stride(0), LINES=lines, ROOM=factors.room,
        HEIGHT=tiles.rows.shape[1], WIDTH=OUTPUTS_A_BLOCK, STEP=RANKS_A_STEP, SPLITS=splits, HAS_BIAS=bias is not None,
        PRECISION=_precision(factors.up),
    )  # fmt: skip
    return y


def _precision(factors: torch.Tensor) -> str:
    return "ieee" if factors.dtype == torch.float32 else "tf32"
