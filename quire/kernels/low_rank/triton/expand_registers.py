"""up @ inner into y, for tiles of up to 8 rows, on the matrix units, of which y is the sum's start.

Outputs are the tall operand. Which of them is which line of the units' tile is free: a thread gets 8 neighbours, which
one load brings of y or of a line of the factor, and nothing goes through shared memory. There is so little to read for
an output that instructions count. In Gluon: no interpreter runs this.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention.triton.decode import LOG2_E
from quire.kernels.low_rank.factors import Factors
from quire.kernels.low_rank.rows import AdapterRows
from quire.kernels.triton.launch import has_pdl

OUTPUTS = 64  # of a warp
WARPS = 4


@gluon.constexpr_function
def _rows(warps):
    """[outputs, rows of a tile]: 8 neighbours of 2 rows a thread."""
    across = [[64 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [0, 1]], [[0, 2], [0, 4], [8, 0], [16, 0], [32, 0]], across, [], [64 * warps, 8]
    )


@gluon.constexpr_function
def _lines(warps):
    """[outputs, ranks]: 8 neighbours of 4 ranks a thread."""
    across = [[64 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [0, 1], [0, 8]], [[0, 2], [0, 4], [8, 0], [16, 0], [32, 0]], across, [],
        [64 * warps, 16],
    )  # fmt: skip


@gluon.jit
def _to_units(y, LAYOUT: gl.constexpr):
    """[outputs, columns] in memory's order → in the units': a thread's even neighbours are in the upper half of tiles,
    the odd ones in the lower."""
    N: gl.constexpr = y.shape[1]
    y = y.reshape([gl.num_warps(), 8, 4, 2, N]).permute((2, 0, 3, 1, 4)).reshape([y.shape[0], N])
    return gl.convert_layout(y, LAYOUT)


@gluon.jit
def _from_units(y, LAYOUT: gl.constexpr):
    N: gl.constexpr = y.shape[1]
    y = y.reshape([4, gl.num_warps(), 2, 8, N]).permute((1, 3, 0, 2, 4)).reshape([y.shape[0], N])
    return gl.convert_layout(y, LAYOUT)


@gluon.jit
def _sigmoid(y, LOG2_E: gl.constexpr):
    """Good to a bit or two of float32: a division and an exponential for all numbers cost several times as much."""
    grown = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [y * -LOG2_E], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + grown], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _inner(at, live, in_rank, split_stride, SPLITS: gl.constexpr):
    """The sum of the shares, in their order."""
    total = gl.load(at, live, 0.0)
    for split in gl.static_range(1, SPLITS):
        total += gl.load(at + split * split_stride, live, 0.0)
    return gl.where(in_rank, total, 0.0)  # lines from an adapter's rank on may be anything


@gluon.jit
def _start(y, has_gains, gains, bias, outputs, inside, HAS_BIAS: gl.constexpr):
    """A product by an adapter's gains, but for its bias, float32."""
    y = y.to(gl.float32)
    if has_gains:
        gain = gl.load(gains + outputs, inside, 1.0)
        y = y * gain[:, None]
        if HAS_BIAS:
            y += (gl.load(bias + outputs, inside, 0.0).to(gl.float32) * (1.0 - gain))[:, None]
    return y


@gluon.jit
def _own_outputs(program, length, n, FIRST_END: gl.constexpr, SECOND_END: gl.constexpr, GATED: gl.constexpr):
    """Of a program that takes `length` of one part: the first, where they end, and of which part."""
    first = program * length
    end = FIRST_END
    part = 0
    if not GATED and SECOND_END > FIRST_END:
        before = (FIRST_END + length - 1) // length
        after = before + (SECOND_END - FIRST_END + length - 1) // length
        if program >= before:
            first = FIRST_END + (program - before) * length
            end = SECOND_END
            part = 1
        if program >= after:
            first = SECOND_END + (program - after) * length
            end = n
            part = 2
    return first, gl.minimum(end, first + length), part


@gluon.jit(do_not_specialize=["num_rows"])
def _expand_registers_kernel(
    y, inner, out, up, gains, bias, tile_slots, tile_rows, ranks, num_rows, n, stride, out_stride,
    LINES: gl.constexpr, ROOM: gl.constexpr, FIRST_END: gl.constexpr, SECOND_END: gl.constexpr,
    SPLITS: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr,
    LOG2_E: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = 64 * WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    BY_ROW: gl.constexpr = _rows(WARPS)
    BY_RANK: gl.constexpr = _lines(WARPS)

    program, tile = gl.program_id(0), gl.program_id(1)
    slot = gl.load(tile_slots + tile)
    row = gl.load(tile_rows + tile * 8 + gl.arange(0, 8, gl.SliceLayout(0, BY_ROW)))
    inner_row = gl.load(tile_rows + tile * 8 + gl.arange(0, 8, gl.SliceLayout(0, RIGHT)))
    adapter = gl.maximum(slot - 1, 0)
    rank = gl.where(slot > 0, gl.load(ranks + 2 * adapter), 0)
    has_gains = (rank > 0) & (gl.load(ranks + 2 * adapter + 1) > 0)
    first, end, part = _own_outputs(program, WIDTH, n, FIRST_END, SECOND_END, GATED)

    output = gl.arange(0, WIDTH, gl.SliceLayout(1, BY_ROW))
    up_output = gl.arange(0, WIDTH, gl.SliceLayout(1, BY_RANK))
    k = gl.arange(0, 16, gl.SliceLayout(0, BY_RANK))
    up_at = up + (adapter.to(gl.int64) * ROOM + k)[None, :] * n + (first + up_output)[:, None]
    in_part = (first + up_output < end)[:, None]
    factor = gl.load(up_at, (k < rank)[None, :] & in_part, 0.0)
    if GATED:
        factor_up = gl.load(up_at + FIRST_END, (k < rank)[None, :] & in_part, 0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    is_mine = slot >= 0 if GATED or RESIDUAL else rank > 0
    if is_mine:
        outputs = first + output
        inside = outputs < end
        at = gl.maximum(row, 0).to(gl.int64)[None, :]
        mask = (row >= 0)[None, :] & inside[:, None]
        y_at = y + at * stride + outputs[:, None]
        out_at = out + at * out_stride + outputs[:, None]
        old = gl.load(y_at, mask, 0.0)
        if GATED:
            old_up = gl.load(y_at + FIRST_END, mask, 0.0)
        if RESIDUAL:
            rest = gl.load(out_at, mask, 0.0)
        inner_k = gl.arange(0, 16, gl.SliceLayout(1, RIGHT))
        inner_at = inner + part * ROOM + gl.maximum(inner_row, 0)[None, :] * LINES + inner_k[:, None]
        split_stride = num_rows * LINES
        inner_live = (inner_row >= 0)[None, :]
        in_rank = (inner_k < rank)[:, None]
        gains_at = gains + adapter.to(gl.int64) * n
        b = _inner(inner_at, inner_live, in_rank, split_stride, SPLITS).to(up.dtype.element_ty)
        if GATED:
            b_up = _inner(inner_at + ROOM, inner_live, in_rank, split_stride, SPLITS).to(up.dtype.element_ty)
        own = _to_units(_start(old, has_gains, gains_at, bias, outputs, inside, HAS_BIAS), MMA)
        own = mma_v2(_to_units(factor, LEFT), b, own)
        if GATED:
            own_up = _start(old_up, has_gains, gains_at, bias, FIRST_END + outputs, inside, HAS_BIAS)
            own_up = mma_v2(_to_units(factor_up, LEFT), b_up, _to_units(own_up, MMA))
        if ROOM > 16:
            for step in range(16, rank, 16):
                there = (step + k < rank)[None, :] & in_part
                more = _to_units(gl.load(up_at + step * n, there, 0.0), LEFT)
                in_more = (step + inner_k < rank)[:, None]
                b_more = _inner(inner_at + step, inner_live, in_more, split_stride, SPLITS).to(up.dtype.element_ty)
                own = mma_v2(more, b_more, own)
                if GATED:
                    more = _to_units(gl.load(up_at + step * n + FIRST_END, there, 0.0), LEFT)
                    b_more = _inner(inner_at + ROOM + step, inner_live, in_more, split_stride, SPLITS)
                    own_up = mma_v2(more, b_more.to(up.dtype.element_ty), own_up)
        if GATED:
            own = own * _sigmoid(own, LOG2_E) * own_up
        result = _from_units(own, BY_ROW)
        if RESIDUAL:
            result += rest.to(gl.float32)
        gl.store(out_at, result.to(out.dtype.element_ty), mask)


def expand(
    y: torch.Tensor,
    inner: torch.Tensor,
    rows: AdapterRows,
    factors: Factors,
    bias: torch.Tensor | None,
    gated: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """inner [splits, rows, parts * room] → y [rows, n], or what follows; see `quire.kernels.low_rank.product`. For up
    to three parts."""
    tiles = rows.tiles
    assert tiles is not None
    splits, num_rows, lines = inner.shape
    n, ends = y.shape[1], factors.ends
    out = y if residual is None else residual
    if gated:
        out, ends = torch.empty((num_rows, n // 2), dtype=y.dtype, device=y.device), ends[:1]
    pdl = has_pdl(y.device)
    if num_rows:
        _expand_registers_kernel[(num_programs(ends, OUTPUTS * WARPS), len(tiles.slots))](
            y, inner, out, factors.up, factors.gains, y if bias is None else bias, tiles.slots, tiles.rows,
            factors.ranks, num_rows, n, y.stride(0), out.stride(0), LINES=lines, ROOM=factors.room,
            FIRST_END=ends[0], SECOND_END=ends[1] if len(ends) > 1 else ends[0], SPLITS=splits,
            HAS_BIAS=bias is not None, GATED=gated, RESIDUAL=residual is not None, LOG2_E=LOG2_E,
            PDL=pdl, num_warps=WARPS, launch_pdl=pdl,
        )  # fmt: skip
    return out


def num_programs(ends: tuple[int, ...], length: int) -> int:
    """That take so many outputs each of one part."""
    return sum(-(-(end - begin) // length) for begin, end in zip((0, *ends[:-1]), ends, strict=True))
