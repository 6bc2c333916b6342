"""x @ weight.T for up to 16 rows and a weight in codes of 4 bits, with norm, gate and residual sum: `skinny_registers`
for these. The weight's words go from memory into registers, become operands of the matrix units there, and what a
line's group has in common is multiplied into its sums.

In Gluon; no interpreter runs this.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gemm.codes import Codes
from quire.kernels.gemm.triton.code_words import (
    line_factor,
    line_scales,
    negated_zeros,
    operands,
    pieces,
    word_layout,
)
from quire.kernels.gemm.triton.codes import KINDS, arguments, by_two
from quire.kernels.gemm.triton.skinny_registers import (
    _finish,
    _mma,
    _out_at,
    _results,
)
from quire.kernels.triton.launch import cdiv, has_pdl

RING_OF_SIXTEEN = 24  # warps' steps of 16 rows: 96 KiB, which every GPU has


class Plan(NamedTuple):
    """lines: of the weight, a program. warps: that share K, 128 columns each at a time. depth: how many of these are
    fetched ahead, of the weight. ring: of x's, how many are in shared memory, where several rows wait."""

    lines: int
    warps: int
    depth: int
    ring: int = 2


@gluon.jit
def _lines(first, N, OUTPUTS: gl.constexpr, USED: gl.constexpr, LINES: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's lines [1, lines, 1] of a program, gates and then ups, and which of them exist; warps' numbers."""
    line = gl.arange(0, LINES, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    output = first + line % OUTPUTS
    inside = ((output < N) & (line < USED))[None, :, None]
    share = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    return (output + line // OUTPUTS * N).to(gl.int64)[None, :, None], inside, share


@gluon.jit
def _words(at, inside, share, word, STEP: gl.constexpr, BLOCKS: gl.constexpr, TAIL: gl.constexpr):
    """The words of each warp's block in step STEP. TAIL: words of a thread in a row's last block, if not all four."""
    AHEAD: gl.constexpr = STEP * gl.num_warps()
    if AHEAD + gl.num_warps() <= BLOCKS and (TAIL == 0 or AHEAD + gl.num_warps() < BLOCKS):
        y = gl.load(at + (AHEAD * 16 + word), inside, 0)
    elif TAIL == 0:
        y = gl.load(at + (AHEAD * 16 + word), inside & (share + AHEAD < BLOCKS), 0)
    else:
        few = word // 4 * TAIL + gl.minimum(word % 4, TAIL - 1)
        own = gl.where(share + AHEAD == BLOCKS - 1, few, word)
        y = gl.load(at + (AHEAD * 16 + own), inside & (share + AHEAD < BLOCKS), 0)
    return y


@gluon.constexpr_function
def _kept_layout(warps):
    """Of [warps, 128] as `_keep` leaves it, a thread's 8 columns of 32 in a row; a warp's lines of results share it."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[1 << i, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[warps, 128],
    )


@gluon.jit
def _keep(x_ptr, gain_ptr, kept, K: gl.constexpr, NORM: gl.constexpr):
    """One row of x, normed but for the factor, to `kept` [pieces, 2 warps, 128]; returns the sum of its squares.

    Once a program, where the operands of each step would have it 8 times.
    """
    PIECES: gl.constexpr = kept.shape[0]
    BLOCKS: gl.constexpr = kept.shape[1]
    FLAT: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    k = gl.arange(0, BLOCKS * 128, FLAT)
    squares = gl.zeros([BLOCKS * 128], gl.float32, FLAT)
    for piece in gl.static_range(PIECES):
        at = piece * BLOCKS * 128 + k
        x = gl.load(x_ptr + at, at < K, 0.0)
        if NORM:
            wide = x.to(gl.float32)
            squares += wide * wide
            x = (wide * gl.load(gain_ptr + at, at < K, 0.0).to(gl.float32)).to(x.dtype)
        kept.index(piece).store(x.reshape([BLOCKS * 4, 4, 4, 2]).permute([0, 2, 1, 3]).reshape([BLOCKS, 128]))
    return gl.sum(squares, axis=0)


@gluon.jit
def _kept(kept, STEP: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The operands of a step [warps, 128, rows], the same in all rows."""
    WARPS: gl.constexpr = gl.num_warps()
    x = kept.index(STEP // 2).slice(STEP % 2 * WARPS, WARPS, 0).load(_kept_layout(WARPS))
    x = x.reshape([WARPS, 4, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([WARPS, 128])
    x = gl.convert_layout(x, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    return gl.broadcast(x[:, :, None], gl.zeros([WARPS, 128, COLUMNS], x.dtype, LAYOUT))[0]


@gluon.jit
def _send(x_ptr, tile, M, x_stride, STEP: gl.constexpr, K: gl.constexpr):
    """Asks for each warp's 128 columns of a step, `tile` [warps, rows, 128]; there are zeros where x has none."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [WARPS, 1, 1], [2, 1, 0])
    row = gl.arange(0, tile.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    share = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    k = (share + STEP * WARPS) * 128 + gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    async_copy.async_copy_global_to_shared(tile, x_ptr + row * x_stride + k, (row < M) & (k < K))
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["M"])
def _code_rows_kernel(
    x_ptr, words_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, gain_ptr, out_ptr, M, N,
    x_stride, words_stride, groups, out_stride, eps,
    K: gl.constexpr, OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, RING: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, OUTER: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    ONE: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = (K + 127) // 128
    TAIL: gl.constexpr = K % 128 // 32
    STEPS: gl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    USED: gl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    LINES: gl.constexpr = max(USED, 16)  # the matrix units take no fewer
    PARTS: gl.constexpr = max(128 // GROUP, 1)
    MMA: gl.constexpr = _mma(WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    WORDS: gl.constexpr = word_layout(LINES, WARPS, True)
    LAYOUT: gl.constexpr = _results(WARPS, OUTPUTS)
    APART: gl.constexpr = ZERO and zero_ptr.dtype.element_ty.is_floating()

    first = gl.program_id(0) * OUTPUTS
    row, inside, share = _lines(first, N, OUTPUTS, USED, LINES, WORDS)
    word = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    words_at = words_ptr + row * (words_stride * 4) + share * 16
    sums_row, in_sums, sums_share = _lines(first, N, OUTPUTS, USED, LINES, MMA)
    scales_at = sums_row * groups
    AHEAD: gl.constexpr = scale_ptr.dtype.element_ty == gl.int16  # many a block: they are fetched with its words
    LATER: gl.constexpr = DEPTH if AHEAD else 0
    words = ()
    scales = ()
    for i in gl.static_range(DEPTH):
        words += (_words(words_at, inside, share, word, i, BLOCKS, TAIL),)
        if AHEAD:
            scales += (line_scales(scale_ptr, scales_at, in_sums, sums_share + i * WARPS, groups, PARTS, GROUP),)
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    squares = gl.zeros([WARPS, COLUMNS], gl.float32, gl.SliceLayout(1, RIGHT))
    if ONE:
        kept = gl.allocate_shared_memory(
            x_ptr.dtype.element_ty, [(STEPS + 1) // 2, 2 * WARPS, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        squares += _keep(x_ptr, gain_ptr, kept, K, NORM) / WARPS
    else:
        x_tiles = gl.allocate_shared_memory(
            x_ptr.dtype.element_ty, [RING, WARPS, COLUMNS, 128], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        )
        for i in gl.static_range(min(RING - 1, STEPS)):
            _send(x_ptr, x_tiles.index(i), M, x_stride, i, K)
    out_at, in_out, n = _out_at(out_ptr, first, M, N, out_stride, COLUMNS, OUTPUTS, LAYOUT)
    residual = 0.0
    if RESIDUAL:
        residual = gl.load(out_at, in_out, 0.0).to(gl.float32)
    acc = gl.zeros([WARPS, LINES, COLUMNS], gl.float32, MMA)
    for i in gl.static_range(STEPS):
        now = words[0]
        words = words[1:]
        if i + DEPTH < STEPS:
            words += (_words(words_at, inside, share, word, i + DEPTH, BLOCKS, TAIL),)
        if i + LATER < STEPS:
            block = sums_share + (i + LATER) * WARPS
            scales += (line_scales(scale_ptr, scales_at, in_sums, block, groups, PARTS, GROUP),)
        times = scales[0]
        scales = scales[1:]
        if ONE:
            x = _kept(kept, i, COLUMNS, RIGHT)
        else:
            async_copy.wait_group(min(RING - 2, STEPS - 1 - i))
            x = x_tiles.index(i % RING).permute([0, 2, 1]).load(RIGHT)
            if i + RING - 1 < STEPS:
                _send(x_ptr, x_tiles.index((i + RING - 1) % RING), M, x_stride, i + RING - 1, K)
        less = gl.full([WARPS, LINES, 1], 8, gl.int32, WORDS)
        if ZERO:
            column = gl.minimum(share + i * WARPS, BLOCKS - 1) * 128
            if PARTS > 1:
                column += word % 4 * 32
            less = gl.load(zero_ptr + row * groups + gl.minimum(column // GROUP, groups - 1), inside, 0)
        weight = operands(now, negated_zeros(less, x.dtype, KIND), table_ptr, x.dtype, KIND, APART)
        weights, lines = pieces(weight, PARTS, True), pieces(x, PARTS, False)
        for part in gl.static_range(PARTS):
            nothing = gl.zeros([WARPS, LINES, COLUMNS], gl.float32, MMA)
            left = gl.convert_layout(weights[part], LEFT, assert_trivial=True)
            right = gl.convert_layout(lines[part], RIGHT, assert_trivial=True)
            acc += mma_v2(left, right, nothing) * line_factor(times, part)
    if OUTER:
        acc *= gl.load(outer_ptr + sums_row, in_sums, 0.0)
    _finish(
        acc, squares, residual, out_at, in_out, n, scale_ptr, bias_ptr, N, eps,
        K, OUTPUTS, LAYOUT, False, NORM, GATED, BIAS, RESIDUAL,
    )  # fmt: skip


def plan(m: int, k: int, *, gated: bool, residual: bool) -> Plan:
    """As measured on an H200 and, for several rows, an H100 for the products of 4B and 8B models. Every program reads
    all of x, and where there are few outputs many programs count for more."""
    if m == 1:
        return Plan(16, 4, 2) if gated else Plan(16, 8, 4 if k > 8192 else 2)
    if not residual:
        how = Plan(32, 8, 1, 4) if gated else Plan(16, 8, 2, 4)
    elif k <= 8192:
        how = Plan(16, 16, 1, 2) if m <= 8 else Plan(16, 8, 1, 3)
    else:
        how = Plan(32, 8, 2, 4)
    return how if m <= 8 else how._replace(ring=min(how.ring, RING_OF_SIXTEEN // how.warps))


def linear(
    x: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: bool,
    out: torch.Tensor,
    how: Plan | None = None,
) -> torch.Tensor:
    """x [m, k] → out [m, n], m ≤ 16; with `residual` the result is added to what stands there. A norm is for one row.
    See `quire.kernels.gemm.linear`."""
    (m, k), n = x.shape, out.shape[1]
    how = how or plan(m, k, gated=gated, residual=residual)
    outputs = how.lines // 2 if gated else how.lines
    codes, _, zero, outer, table = arguments(weight)
    scale = by_two(weight)
    gain, eps = norm or (x, 0.0)
    early = m > 1  # see `skinny_registers`
    pdl = has_pdl(x.device)
    _code_rows_kernel[(cdiv(n, outputs),)](
        x, codes.view(torch.int32), scale, zero, outer, table, x if bias is None else bias, gain, out, m, n,
        x.stride(0), codes.stride(0) // 16, scale.shape[1], out.stride(0), eps, K=k, OUTPUTS=outputs,
        COLUMNS=8 if m <= 8 else 16, DEPTH=min(how.depth, cdiv(k, 128 * how.warps)),
        RING=min(how.ring, cdiv(k, 128 * how.warps) + 1),
        KIND=KINDS[weight.kind], GROUP=weight.group, ZERO=weight.zero is not None, OUTER=weight.outer is not None,
        NORM=norm is not None, GATED=gated, BIAS=bias is not None, RESIDUAL=residual, ONE=m == 1, EARLY=early, PDL=pdl,
        num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
