"""up @ inner into y as in `expand_registers.py`, where there are so many outputs that a program takes several blocks of
them, one after the other: the next block's numbers are on their way to shared memory while this one's are multiplied.
For ranks of one step.

With a gate, the result is what the product that follows multiplies, its tiles have the same rows, and a program has all
rows of its tile: it multiplies its outputs by the first factor of that product too. That is a share of the sum, one a
program. In Gluon: no interpreter runs this.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention.triton.decode import LOG2_E
from quire.kernels.gemm.triton.skinny_registers import _mma, _results
from quire.kernels.low_rank.factors import RANKS_A_STEP, Factors
from quire.kernels.low_rank.rows import AdapterRows
from quire.kernels.low_rank.triton.expand_registers import (
    OUTPUTS,
    WARPS,
    _from_units,
    _inner,
    _lines,
    _own_outputs,
    _rows,
    _sigmoid,
    _start,
    _to_units,
    num_programs,
)
from quire.kernels.triton.launch import has_pdl, next_power_of_2, num_processors

STAGES = 2
MOST_BLOCKS = 8  # of a program


@gluon.jit
def _send(tiles, stage, at, output, end, columns, begin, HALF: gl.constexpr, HALVES: gl.constexpr):
    """Ask for the numbers of the block from output `begin` on, of each half; what is not there is zero."""
    there = columns & (begin + output < end)[:, None]
    for half in gl.static_range(HALVES):
        tile = tiles.index(stage * HALVES + half)
        async_copy.async_copy_global_to_shared(tile, at + half * HALF + begin, there, ".cg")


@gluon.jit(do_not_specialize=["num_rows", "blocks"])
def _expand_ring_kernel(
    y, inner, out, up, gains, bias, tile_slots, tile_rows, ranks, next_down, next_ranks, next_inner,
    num_rows, n, stride, out_stride, next_k, blocks,
    LINES: gl.constexpr, FIRST_END: gl.constexpr, SECOND_END: gl.constexpr, SPLITS: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr, READ: gl.constexpr, STAGES: gl.constexpr,
    LOG2_E: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = 64 * WARPS
    HALVES: gl.constexpr = 2 if GATED else 1
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    BY_ROW: gl.constexpr = _rows(WARPS)
    BY_RANK: gl.constexpr = _lines(WARPS)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [0, 1])  # no two threads want the same bank
    # Of the product that reads the result: lines are tall, every warp has its own outputs.
    NEXT: gl.constexpr = _mma(WARPS)
    NEXT_LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=NEXT, k_width=8)
    NEXT_RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=NEXT, k_width=8)
    SUMS: gl.constexpr = _results(WARPS, 16)
    factors = gl.allocate_shared_memory(up.dtype.element_ty, [STAGES * HALVES, WIDTH, 16], SHARED)
    olds = gl.allocate_shared_memory(y.dtype.element_ty, [STAGES * HALVES, WIDTH, 8], SHARED)

    program, tile = gl.program_id(0), gl.program_id(1)
    slot = gl.load(tile_slots + tile)
    row = gl.load(tile_rows + tile * 8 + gl.arange(0, 8, gl.SliceLayout(0, BY_ROW)))
    inner_row = gl.load(tile_rows + tile * 8 + gl.arange(0, 8, gl.SliceLayout(0, RIGHT)))
    adapter = gl.maximum(slot - 1, 0)
    rank = gl.where(slot > 0, gl.load(ranks + 2 * adapter), 0)
    has_gains = (rank > 0) & (gl.load(ranks + 2 * adapter + 1) > 0)
    first, end, part = _own_outputs(program, WIDTH * blocks, n, FIRST_END, SECOND_END, GATED)

    output = gl.arange(0, WIDTH, gl.SliceLayout(1, BY_ROW))
    up_output = gl.arange(0, WIDTH, gl.SliceLayout(1, BY_RANK))
    k = gl.arange(0, 16, gl.SliceLayout(0, BY_RANK))
    up_at = up + (adapter.to(gl.int64) * 16 + k)[None, :] * n + up_output[:, None]
    in_rank = (k < rank)[None, :]
    for i in gl.static_range(STAGES - 1):
        _send(factors, i, up_at, up_output, end, in_rank, first + i * WIDTH, FIRST_END, HALVES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    is_mine = slot >= 0 if GATED or RESIDUAL else rank > 0
    if is_mine:
        live = (row >= 0)[None, :]
        at = gl.maximum(row, 0).to(gl.int64)[None, :]
        y_at = y + at * stride + output[:, None]
        out_at = out + at * out_stride + output[:, None]
        for i in gl.static_range(STAGES - 1):
            _send(olds, i, y_at, output, end, live, first + i * WIDTH, FIRST_END, HALVES)
            async_copy.commit_group()
        inner_k = gl.arange(0, 16, gl.SliceLayout(1, RIGHT))
        inner_at = inner + part * 16 + gl.maximum(inner_row, 0)[None, :] * LINES + inner_k[:, None]
        inner_live = (inner_row >= 0)[None, :]
        inner_in_rank = (inner_k < rank)[:, None]
        split_stride = num_rows * LINES
        gains_at = gains + adapter.to(gl.int64) * n
        b = _inner(inner_at, inner_live, inner_in_rank, split_stride, SPLITS).to(up.dtype.element_ty)
        if GATED:
            b_up = _inner(inner_at + 16, inner_live, inner_in_rank, split_stride, SPLITS).to(up.dtype.element_ty)
        if READ:
            next_rank = gl.where(slot > 0, gl.load(next_ranks + 2 * adapter), 0)
            line = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, NEXT_LEFT)))
            warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, NEXT_LEFT)))[:, None, None]
            column = warp * 64 + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, NEXT_LEFT)))[None, None, :]
            next_at = next_down + (adapter.to(gl.int64) * 16 + line)[None, :, None] * next_k + column
            has_line = (line < next_rank)[None, :, None]
            sums = gl.zeros([WARPS, 16, 8], gl.float32, NEXT)
        stage = 0
        for begin in range(first, end, WIDTH):
            outputs = begin + output
            inside = outputs < end
            mask = live & inside[:, None]
            if RESIDUAL:
                rest = gl.load(out_at + begin, mask, 0.0)
            if READ:
                lines = gl.load(next_at + begin, has_line & (begin + column < end), 0.0)
            ahead = begin + (STAGES - 1) * WIDTH
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            _send(factors, free, up_at, up_output, end, in_rank, ahead, FIRST_END, HALVES)
            _send(olds, free, y_at, output, end, live, ahead, FIRST_END, HALVES)
            async_copy.commit_group()
            async_copy.wait_group(STAGES - 1)
            old = olds.index(stage * HALVES).load(BY_ROW)
            own = _to_units(_start(old, has_gains, gains_at, bias, outputs, inside, HAS_BIAS), MMA)
            own = mma_v2(_to_units(factors.index(stage * HALVES).load(BY_RANK), LEFT), b, own)
            if GATED:
                old = olds.index(stage * HALVES + 1).load(BY_ROW)
                own_up = _start(old, has_gains, gains_at, bias, FIRST_END + outputs, inside, HAS_BIAS)
                own_up = _to_units(own_up, MMA)
                own_up = mma_v2(_to_units(factors.index(stage * HALVES + 1).load(BY_RANK), LEFT), b_up, own_up)
                own = own * _sigmoid(own, LOG2_E) * own_up
            result = _from_units(own, BY_ROW)
            if RESIDUAL:
                result += rest.to(gl.float32)
            rounded = result.to(out.dtype.element_ty)
            gl.store(out_at + begin, rounded, mask)
            if READ:
                x = gl.convert_layout(rounded.reshape([WARPS, 64, 8]), NEXT_RIGHT)
                sums = mma_v2(lines, x.to(next_down.dtype.element_ty), sums)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        if READ:
            async_copy.wait_group(0)  # also what was asked for behind the end: the sums take its place
            shares = gl.allocate_shared_memory(
                gl.float32, sums.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), sums
            )
            total = gl.sum(shares.load(SUMS), axis=0)
            next_row = gl.load(tile_rows + tile * 8 + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, SUMS))))
            next_line = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
            sum_at = next_inner + (program * num_rows + gl.maximum(next_row, 0))[None, :] * 16 + next_line[:, None]
            gl.store(sum_at, total, (next_line < next_rank)[:, None] & (next_row >= 0)[None, :])


def num_blocks(y: torch.Tensor, rows: AdapterRows, factors: Factors, *, gated: bool) -> int:
    """Of a program, such that all programs of as many tiles as there can be fit the device at once. 1: not for these
    kernels.

    A power of two: what follows the gate is compiled for the number of its shares.
    """
    assert rows.tiles is not None
    ends = factors.ends[:1] if gated else factors.ends
    even = not any(place % 16 for place in (*factors.ends, y.stride(0), y.data_ptr()))  # copies are of 16 bytes
    if factors.room != RANKS_A_STEP or y.element_size() != 2 or not even:
        return 1
    fitting = (4 if gated else 6) * num_processors(y.device)  # by their registers
    programs = num_programs(ends, OUTPUTS * WARPS) * len(rows.tiles.slots)
    return min(next_power_of_2(-(-programs // fitting)), MOST_BLOCKS)


def expand(
    y: torch.Tensor,
    inner: torch.Tensor,
    rows: AdapterRows,
    factors: Factors,
    bias: torch.Tensor | None,
    gated: bool,
    residual: torch.Tensor | None,
    reader: Factors | None,
    blocks: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """inner [splits, rows, parts * 16] → y [rows, n], or what follows; see `quire.kernels.low_rank.product`. For up to
    three parts. reader: of the product that the gated result goes to; with what it makes of it, else None."""
    tiles = rows.tiles
    assert tiles is not None
    splits, num_rows, lines = inner.shape
    n, ends = y.shape[1], factors.ends
    out = y if residual is None else residual
    if gated:
        out, ends = torch.empty((num_rows, n // 2), dtype=y.dtype, device=y.device), ends[:1]
    programs = num_programs(ends, OUTPUTS * WARPS * blocks)
    next_inner = None
    if reader is not None:
        next_inner = torch.empty((programs, num_rows, RANKS_A_STEP), dtype=torch.float32, device=y.device)
    after = factors if reader is None else reader
    pdl = has_pdl(y.device)
    if num_rows:
        _expand_ring_kernel[(programs, len(tiles.slots))](
            y, inner, out, factors.up, factors.gains, y if bias is None else bias, tiles.slots, tiles.rows,
            factors.ranks, after.down, after.ranks, inner if next_inner is None else next_inner,
            num_rows, n, y.stride(0), out.stride(0), after.down.shape[2], blocks,
            LINES=lines, FIRST_END=ends[0], SECOND_END=ends[1] if len(ends) > 1 else ends[0], SPLITS=splits,
            HAS_BIAS=bias is not None, GATED=gated, RESIDUAL=residual is not None, READ=reader is not None,
            STAGES=STAGES, LOG2_E=LOG2_E, PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
        )  # fmt: skip
    return out, next_inner
