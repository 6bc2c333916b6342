"""down @ x of tiles of up to 8 rows, on the matrix units: an adapter's lines go from memory straight into the registers
that the units read, as in `kernels/gemm/triton/skinny_registers.py`, which says how.

A program has a tile's share of x's columns in registers and takes blocks of 16 lines past it.

In Gluon: no interpreter runs this.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gemm.triton.skinny_registers import _mma, _results
from quire.kernels.low_rank.factors import RANKS_A_STEP, Factors
from quire.kernels.low_rank.rows import AdapterRows
from quire.kernels.triton.launch import has_pdl, num_processors

WIDTH = 128  # columns of x that a warp multiplies at a time
WARPS = 4
SPLITS = 8  # programs that share x's columns; the same for any rows, so that a row's sums are the same in all of them
DEPTH = 2  # tiles of a program on their way
PROGRAMS = 4  # that fit a processor
MOST_BLOCKS = 4  # of lines, one after the other: each is code of its own


@gluon.jit
def _tile(
    weights, column, rank, line, first, i, k,
    LINES: gl.constexpr, ROOM: gl.constexpr, STEPS: gl.constexpr, STRIDE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """The i-th that a program takes, [warps, lines, columns]."""
    lines = (first + i // STEPS) * 16 + line
    inside = ((lines % ROOM < rank) & (lines < LINES))[None, :, None]
    offset = i % STEPS * STRIDE
    if not EVEN:
        inside = inside & (column + offset < k)
    return gl.load(weights + lines.to(gl.int64)[None, :, None] * k + offset, inside, 0.0)


@gluon.jit(do_not_specialize=["num_rows"])
def _shrink_registers_kernel(
    x, down, inner, tile_slots, tile_rows, ranks, num_rows, k, stride,
    LINES: gl.constexpr, ROOM: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, STEPS: gl.constexpr,
    BLOCKS: gl.constexpr, DEPTH: gl.constexpr, EVEN: gl.constexpr, BESIDE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = _mma(WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=8)
    LAYOUT: gl.constexpr = _results(WARPS, 16)
    RESULT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    STRIDE: gl.constexpr = WARPS * WIDTH
    TILES: gl.constexpr = BLOCKS * STEPS

    first, split, tile = gl.program_id(0) * BLOCKS, gl.program_id(1), gl.program_id(2)
    slot = gl.load(tile_slots + tile)
    adapter = gl.maximum(slot - 1, 0)
    rank = gl.where(slot > 0, gl.load(ranks + 2 * adapter), 0)
    begin = split * STEPS * STRIDE
    line = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
    column = begin + warp * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    weights = down + adapter.to(gl.int64) * LINES * k + column
    tiles = ()
    for i in gl.static_range(DEPTH):
        tiles += (_tile(weights, column, rank, line, first, i, k, LINES, ROOM, STEPS, STRIDE, EVEN),)
    row = gl.load(tile_rows + tile * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(0, gl.SliceLayout(1, RIGHT))))
    out_row = gl.load(tile_rows + tile * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(0, RESULT)))
    if PDL:
        gdc_launch_dependents()
        if not BESIDE:  # else x is there
            gdc_wait()
    if rank > 0:
        ahead = tiles
        x_warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))[:, None, None]
        at = begin + x_warp * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
        x_at = x + gl.maximum(row, 0).to(gl.int64)[None, None, :] * stride + at
        xs = ()
        for step in gl.static_range(STEPS):
            inside = (row >= 0)[None, None, :]
            if not EVEN:
                inside = inside & (at + step * STRIDE < k)
            read = gl.load(x_at + step * STRIDE, inside, 0.0, cache_modifier=".cg" if BESIDE else "")
            xs += (read.to(down.dtype.element_ty),)
        out_at = inner + (split * num_rows + gl.maximum(out_row, 0))[None, :] * LINES
        acc = gl.zeros([WARPS, 16, HEIGHT], gl.float32, MMA)
        for i in gl.static_range(TILES):
            now = ahead[0]
            ahead = ahead[1:]
            if i + DEPTH < TILES:
                ahead += (_tile(weights, column, rank, line, first, i + DEPTH, k, LINES, ROOM, STEPS, STRIDE, EVEN),)
            acc = mma_v2(now, xs[i % STEPS], acc)
            if (i + 1) % STEPS == 0:
                parts = gl.allocate_shared_memory(
                    gl.float32, acc.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), acc
                )
                total = gl.sum(parts.load(LAYOUT), axis=0)
                lines = (first + i // STEPS) * 16 + gl.arange(0, 16, gl.SliceLayout(1, RESULT))
                inside = (lines % ROOM < rank) & (lines < LINES)
                gl.store(out_at + lines[:, None], total, inside[:, None] & (out_row >= 0)[None, :])
                acc = gl.zeros([WARPS, 16, HEIGHT], gl.float32, MMA)
    if BESIDE:
        is_one = (gl.program_id(0) == 0) & (split == 0) & (tile == 0)
        if is_one:  # keeps the kernel from ending ahead of the product, and so what comes next from starting too early
            gdc_wait()


def room_for(x: torch.Tensor, factors: Factors) -> torch.Tensor:
    """What `shrink` writes: float32 [splits, rows, parts * room]."""
    lines, k = factors.down.shape[1:]
    steps = -(-k // (WARPS * WIDTH))
    return torch.empty((-(-steps // -(-steps // SPLITS)), len(x), lines), dtype=torch.float32, device=x.device)


def shrink(
    x: torch.Tensor, rows: AdapterRows, factors: Factors, inner: torch.Tensor | None = None, *, beside: bool = False
) -> torch.Tensor:
    """x [rows, k] → float32 [splits, rows, parts * room], `inner` if given; see `quire.kernels.low_rank.product`.

    beside: the kernel launched just before lets this one start when x is there, and not before: it runs beside it, and
    ends after it.
    """
    tiles = rows.tiles
    assert tiles is not None
    lines, k = factors.down.shape[1:]
    height, blocks, count = tiles.rows.shape[1], lines // RANKS_A_STEP, len(tiles.slots)
    inner = room_for(x, factors) if inner is None else inner
    splits = len(inner)
    own = -(-k // (WARPS * WIDTH * splits))
    together = min(max(blocks * splits * count // (PROGRAMS * num_processors(x.device)), 1), blocks, MOST_BLOCKS)
    pdl = has_pdl(x.device)
    if len(x):
        _shrink_registers_kernel[(-(-blocks // together), splits, count)](
            x, factors.down, inner, tiles.slots, tiles.rows, factors.ranks, len(x), k, x.stride(0), LINES=lines,
            ROOM=factors.room, HEIGHT=height, WIDTH=WIDTH, STEPS=own, BLOCKS=together, DEPTH=min(DEPTH, own * together),
            EVEN=k == splits * own * WARPS * WIDTH, BESIDE=beside and pdl, PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
        )  # fmt: skip
    return inner
