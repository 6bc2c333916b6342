"""Experts in codes of so few tokens that hardly two want the same: no order, every choice by itself, as in `direct`;
but codes become operands of the matrix units on their way through registers, as in `code_rows`.

Gate and up: a program has some outputs of one choice. Down: some outputs of one token, over all of its experts, whose
columns stand in a row; the results are added to the residual. Warps share the blocks of 128 columns.

In Gluon; no interpreter runs this.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gemm.codes import BLOCK, NIBBLES, WORD, Codes
from quire.kernels.gemm.triton.code_rows import _kept
from quire.kernels.gemm.triton.code_words import (
    line_factor,
    line_scales,
    negated_zeros,
    operands,
    pieces,
    word_layout,
)
from quire.kernels.gemm.triton.codes import KINDS, arguments, by_two
from quire.kernels.gemm.triton.skinny_registers import _mma, _results, _widened
from quire.kernels.moe.inside import Gate, Inside
from quire.kernels.moe.triton.code_inside import gated, squared
from quire.kernels.triton.launch import cdiv, has_pdl


class Plan(NamedTuple):
    """lines: of the weight, a program. warps: that share K. depth: blocks of each that are fetched ahead. registers: of
    a thread at most, so that as many programs as there should be fit a processor."""

    lines: int
    warps: int
    depth: int
    registers: int | None = None


@gluon.constexpr_function
def _each(k, warps):
    """Blocks of a choice's columns. Where the last is none of 128 columns, a step has no such one but at its end."""
    blocks = (k + 127) // 128
    return (blocks + warps - 1) // warps * warps if k % 128 else blocks


@gluon.jit
def _fetched(
    x_ptr, gain_ptr, PIECES: gl.constexpr, BLOCKS: gl.constexpr, K: gl.constexpr, EACH: gl.constexpr,
    CHOICES: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """The choices' rows of x one behind the other, each of EACH blocks, in PIECES of BLOCKS; and of the norm's weight,
    which goes along."""
    FLAT: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    k = gl.arange(0, BLOCKS * 128, FLAT)
    y = ()
    for piece in gl.static_range(PIECES):
        at = piece * BLOCKS * 128 + k
        which = at // (EACH * 128)
        column = at % (EACH * 128)
        inside = (column < K) & (which < CHOICES)
        x = gl.load(x_ptr + which * K + column, inside, 0.0)
        gain = x
        if NORM:
            gain = gl.load(gain_ptr + column, inside, 0.0)
        y += ((x, gain),)
    return y


@gluon.jit
def _keep(fetched, kept, NORM: gl.constexpr, BYTES: gl.constexpr):
    """What is `_fetched`, normed but for the factor, to `kept` [pieces, 2 warps, 128]; returns the sum of its squares.
    See `code_rows`; for bytes columns are in their order."""
    PIECES: gl.constexpr = kept.shape[0]
    BLOCKS: gl.constexpr = kept.shape[1]
    squares = gl.zeros([BLOCKS * 128], gl.float32, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    for piece in gl.static_range(PIECES):
        x = fetched[piece][0]
        if NORM:
            wide = x.to(gl.float32)
            squares += wide * wide
            x = (wide * fetched[piece][1].to(gl.float32)).to(x.dtype)
        if BYTES:
            x = x.reshape([BLOCKS, 128])
        else:
            x = x.reshape([BLOCKS * 4, 4, 4, 2]).permute([0, 2, 1, 3]).reshape([BLOCKS, 128])
        kept.index(piece).store(x)
    return gl.sum(squares, axis=0)


@gluon.jit
def _row(kept, STEP: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The operands of a step [warps, 128, rows], the same in all rows, from columns in their order."""
    WARPS: gl.constexpr = gl.num_warps()
    x = kept.index(STEP // 2).slice(STEP % 2 * WARPS, WARPS, 0).load(gl.SliceLayout(2, LAYOUT))
    return gl.broadcast(x[:, :, None], gl.zeros([WARPS, 128, COLUMNS], x.dtype, LAYOUT))[0]


@gluon.jit
def _of_bytes(codes, like, KIND: gl.constexpr):
    """What bytes stand for, unscaled."""
    if KIND == 1:  # behind the bits of 1024, whose last place counts ones
        shifted = (codes.to(gl.uint8, bitcast=True) ^ 128).to(gl.uint16) | 0x6400
        y = (shifted.to(gl.float16, bitcast=True) - 1152.0).to(gl.float32).to(like.dtype)
    else:
        y = _widened(codes, like)
    return y


@gluon.jit
def _block(share, experts_ptr, STEP: gl.constexpr, EACH: gl.constexpr, BLOCKS: gl.constexpr, CHOICES: gl.constexpr):
    """Of each warp in a step [warps, 1, 1]: the number of its choice, its expert, its block, and whether there is such
    a one."""
    at = share + STEP * gl.num_warps()
    which = at // EACH
    block = at % EACH
    expert = gl.load(experts_ptr + which, which < CHOICES, -1)
    return which, gl.maximum(expert, 0).to(gl.int64), block, (expert >= 0) & (block < BLOCKS)


@gluon.jit
def _words(
    words_ptr, expert, block, there, line, stride, word,
    STEP: gl.constexpr, EACH: gl.constexpr, BLOCKS: gl.constexpr, TAIL: gl.constexpr, ALL: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """The words of each warp's block in a step, or its bytes. TAIL: words of a thread in a row's last block, where that
    is not whole. stride: of lines, in units of 16 bytes."""
    at = words_ptr + (expert * ALL + line) * (stride * (16 if BYTES else 4))
    if BYTES:
        if TAIL:
            there = there & ((block < BLOCKS - 1) | (word < TAIL * 32))
        y = gl.load(at + (block * 128 + word), there, 0.0)
    elif TAIL == 0 or (STEP + 1) * gl.num_warps() % EACH != 0:
        y = gl.load(at + (block * 16 + word), there, 0)
    else:
        is_last = block == BLOCKS - 1
        few = word // 4 * TAIL + gl.minimum(word % 4, TAIL - 1)
        y = gl.load(at + (block * 16 + gl.where(is_last, few, word)), there, 0)
    return y


@gluon.jit
def _code_direct_kernel(
    x_ptr, words_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, gain_ptr, experts_ptr, share_ptr, out_ptr,
    x_stride, stride, groups, out_stride, eps,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, OUTPUTS: gl.constexpr, DEPTH: gl.constexpr,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, OUTER: gl.constexpr, NORM: gl.constexpr,
    GATED: gl.constexpr, SQUARED: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, SHIFT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """GATED: gate and up of a choice, or up alone, SQUARED. Else down, of a token."""
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = 8  # of the sums: the same row in all
    CHOICES: gl.constexpr = 1 if GATED else TOP_K
    TWICE: gl.constexpr = GATED and not SQUARED
    BLOCKS: gl.constexpr = (K + 127) // 128
    TAIL: gl.constexpr = K % 128 // 32
    EACH: gl.constexpr = _each(K, WARPS)
    STEPS: gl.constexpr = (CHOICES * EACH + WARPS - 1) // WARPS
    USED: gl.constexpr = 2 * OUTPUTS if TWICE else OUTPUTS
    LINES: gl.constexpr = max(USED, 16)  # the matrix units take no fewer
    ALL: gl.constexpr = 2 * N if TWICE else N  # lines of an expert
    PARTS: gl.constexpr = max(128 // GROUP, 1)
    MMA: gl.constexpr = _mma(WARPS)
    BYTES: gl.constexpr = KIND == 1 or KIND == 2
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=8 if BYTES else 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=8 if BYTES else 2)
    WORDS: gl.constexpr = LEFT if BYTES else word_layout(LINES, WARPS, True)
    LAYOUT: gl.constexpr = _results(WARPS, OUTPUTS)
    APART: gl.constexpr = ZERO and zero_ptr.dtype.element_ty.is_floating()

    first = gl.program_id(0) * OUTPUTS
    row = gl.program_id(1)
    n = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))
    m = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    out_at = out_ptr + row.to(gl.int64) * out_stride + n[:, None] + 0 * m[None, :]
    in_out = (n < N)[:, None] & (m < 1)[None, :]
    if GATED:
        x_ptr += (row // TOP_K).to(gl.int64) * x_stride
    else:
        x_ptr += row.to(gl.int64) * (CHOICES * K)
    experts_ptr += row * CHOICES
    share_ptr += row * CHOICES
    PIECES: gl.constexpr = (STEPS + 1) // 2
    if NORM:  # x is what the choices were made of: who made them has waited for it before this began
        rows = _fetched(x_ptr, gain_ptr, PIECES, 2 * WARPS, K, EACH, CHOICES, NORM)
    if PDL and GATED:
        gdc_wait()
        gdc_launch_dependents()
    # Of the product down this is ahead of the wait: the one before has waited for who made the choices, ere this began.
    some = gl.load(experts_ptr)
    for i in gl.static_range(1, CHOICES):
        some = gl.maximum(some, gl.load(experts_ptr + i))
    if some < 0:
        if PDL and not GATED:
            gdc_wait()
            gdc_launch_dependents()
        if GATED or not ADD:
            gl.store(out_at, gl.zeros([OUTPUTS, COLUMNS], out_ptr.dtype.element_ty, gl.SliceLayout(0, LAYOUT)), in_out)
        return
    line = gl.arange(0, LINES, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :, None]
    in_words = (first + line % OUTPUTS < N) & (line < USED)
    line = first + line % OUTPUTS + line // OUTPUTS * N
    word = gl.arange(0, 128 if BYTES else 16, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    share = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None, None]
    of_sums = gl.arange(0, LINES, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    in_sums = (first + of_sums % OUTPUTS < N) & (of_sums < USED)
    of_sums = first + of_sums % OUTPUTS + of_sums // OUTPUTS * N
    sums_share = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    AHEAD: gl.constexpr = scale_ptr.dtype.element_ty == gl.int16  # many a block: they are fetched with its words
    LATER: gl.constexpr = DEPTH if AHEAD else 0
    words = ()
    scales = ()
    for i in gl.static_range(min(DEPTH, STEPS)):
        which, expert, block, there = _block(share, experts_ptr, i, EACH, BLOCKS, CHOICES)
        words += (_words(
            words_ptr, expert, block, there & in_words, line, stride, word, i, EACH, BLOCKS, TAIL, ALL, BYTES,
        ),)  # fmt: skip
        if AHEAD:
            which, expert, block, there = _block(sums_share, experts_ptr, i, EACH, BLOCKS, CHOICES)
            scales += (line_scales(
                scale_ptr, (expert * ALL + of_sums) * groups, there & in_sums, block, groups, PARTS, GROUP
            ),)  # fmt: skip
    if PDL and not GATED:
        gdc_wait()
        gdc_launch_dependents()
    kept = gl.allocate_shared_memory(
        x_ptr.dtype.element_ty, [PIECES, 2 * WARPS, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    if not NORM:
        rows = _fetched(x_ptr, gain_ptr, PIECES, 2 * WARPS, K, EACH, CHOICES, NORM)
    squares = _keep(rows, kept, NORM, BYTES)
    residual = 0.0
    if ADD:
        residual = gl.load(out_at, in_out, 0.0).to(gl.float32)
    acc = gl.zeros([WARPS, LINES, COLUMNS], gl.float32, MMA)
    for i in gl.static_range(STEPS):
        now = words[0]
        words = words[1:]
        if i + DEPTH < STEPS:
            which, expert, block, there = _block(share, experts_ptr, i + DEPTH, EACH, BLOCKS, CHOICES)
            words += (_words(
                words_ptr, expert, block, there & in_words, line, stride, word, i + DEPTH, EACH, BLOCKS, TAIL,
                ALL, BYTES,
            ),)  # fmt: skip
        if i + LATER < STEPS:
            which, expert, block, there = _block(sums_share, experts_ptr, i + LATER, EACH, BLOCKS, CHOICES)
            scales += (line_scales(
                scale_ptr, (expert * ALL + of_sums) * groups, there & in_sums, block, groups, PARTS, GROUP
            ),)  # fmt: skip
        factors = scales[0]
        scales = scales[1:]
        if BYTES:
            x = _row(kept, i, COLUMNS, RIGHT)
            weight = _of_bytes(now, x, KIND)
        else:
            x = _kept(kept, i, COLUMNS, RIGHT)
            less = gl.full([WARPS, LINES, 1], 8, gl.int32, WORDS)
            if ZERO:
                which, expert, block, there = _block(share, experts_ptr, i, EACH, BLOCKS, CHOICES)
                column = block * 128
                if PARTS > 1:
                    column += word % 4 * 32
                group = gl.minimum(column // GROUP, groups - 1)
                less = gl.load(zero_ptr + ((expert * ALL + line) * groups + group), there & in_words, 0)
            weight = operands(now, negated_zeros(less, x.dtype, KIND), table_ptr, x.dtype, KIND, APART)
        which, expert, block, there = _block(sums_share, experts_ptr, i, EACH, BLOCKS, CHOICES)
        of_expert = expert * ALL + of_sums
        inside = there & in_sums
        times = gl.full([WARPS, LINES, 1], 1.0, gl.float32, MMA)
        if not GATED:
            times *= gl.load(share_ptr + which, which < CHOICES, 0.0)
        if OUTER:
            times *= gl.load(outer_ptr + of_expert, inside, 0.0)
        weights, lines = pieces(weight, PARTS, True), pieces(x, PARTS, False)
        for part in gl.static_range(PARTS):
            nothing = gl.zeros([WARPS, LINES, COLUMNS], gl.float32, MMA)
            left = gl.convert_layout(weights[part], LEFT, assert_trivial=True)
            right = gl.convert_layout(lines[part], RIGHT, assert_trivial=True)
            acc += mma_v2(left, right, nothing) * (line_factor(factors, part) * times)
    parts = gl.allocate_shared_memory(gl.float32, acc.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), acc)
    y = gl.sum(parts.slice(0, OUTPUTS, 1).load(LAYOUT), axis=0)
    up = y
    if TWICE:
        up = gl.sum(parts.slice(OUTPUTS, OUTPUTS, 1).load(LAYOUT), axis=0)
    if NORM:
        by = gl.rsqrt(squares / K + eps)
        y *= by
        up *= by
    if BIAS:
        for i in gl.static_range(CHOICES):
            expert = gl.load(experts_ptr + i)
            at = bias_ptr + expert.to(gl.int64) * ALL + n
            bias = gl.load(at, (n < N) & (expert >= 0), 0.0).to(gl.float32)[:, None]
            if not GATED:
                bias *= gl.load(share_ptr + i)
            y += bias
            if TWICE:
                up += gl.load(at + N, n < N, 0.0).to(gl.float32)[:, None]
    if TWICE:
        y = gated(y, up, ALPHA, LIMIT, SHIFT)
    elif SQUARED:
        y = squared(y)
    if ADD:
        y += residual
    gl.store(out_at, y.to(out_ptr.dtype.element_ty), in_out)


def plan(weight: Codes, *, gated: bool) -> Plan:
    """As measured on an H100 for mixtures of 20B and 30B; bytes take the registers of twice as many codes."""
    ahead = by_two(weight) is not weight.scale  # scales are on their way with the codes
    if gated:
        return Plan(16, 4, 2, 80 if ahead else None)
    if ahead:
        return Plan(16, 8, 3, 128)
    return Plan(16, 8, 4 if weight.kind in NIBBLES else 2)


def takes(weight: Codes) -> bool:
    """Whether the kernel is made for weight [experts, n, k]: whole words, of which each has one scale and zero, or
    bytes without zeros."""
    group = BLOCK if weight.scale.shape[2] == 1 else weight.group
    whole = weight.columns % WORD == 0 and (BLOCK % group == 0 or group % BLOCK == 0)
    has_zeros = weight.zero is not None
    if weight.kind in NIBBLES:
        return whole and group >= (WORD if has_zeros else 16)
    return whole and group >= WORD and not has_zeros


def add_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Codes,
    down: Codes,
    residual: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    inside: Inside,
) -> torch.Tensor:
    """See `quire.kernels.moe.experts`; gate_up, down: of all experts, that it `takes`."""
    gate, first, second = inside
    (tokens, top_k), hidden = experts.shape, x.shape[1]
    inner = torch.empty((tokens * top_k, down.columns), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device) if residual is None else residual
    choices, add = (experts, weights), residual is not None
    _launch(x, gate_up, first, choices, inner, norm, gate, plan(gate_up, gated=True), gated=True, add=False)
    _launch(inner, down, second, choices, out, None, Gate(), plan(down, gated=False), gated=False, add=add)
    return out


def _launch(
    x: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None,
    choices: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
    gate: Gate,
    how: Plan,
    *,
    gated: bool,
    add: bool,
) -> None:
    (experts, shares), (codes, _, zero, outer, table), scale = choices, arguments(weight), by_two(weight)
    rows, n = out.shape
    gain, eps = norm or (x, 0.0)
    pdl = has_pdl(x.device)
    outputs = how.lines // 2 if gated and not gate.squared else how.lines
    words = codes.view(torch.int32) if weight.kind in NIBBLES else codes
    _code_direct_kernel[(cdiv(n, outputs), rows)](
        x, words, scale, zero, outer, table, x if bias is None else bias, gain, experts, shares, out,
        x.stride(0), codes.stride(1) * codes.element_size() // 16, scale.shape[2], out.stride(0), eps, N=n,
        K=weight.columns, TOP_K=experts.shape[1], OUTPUTS=outputs, DEPTH=how.depth, KIND=KINDS[weight.kind],
        GROUP=weight.group, ZERO=weight.zero is not None, OUTER=weight.outer is not None, NORM=norm is not None,
        GATED=gated, SQUARED=gate.squared, BIAS=bias is not None, ADD=add, ALPHA=gate.alpha, LIMIT=gate.limit,
        SHIFT=gate.shift, PDL=pdl, num_warps=how.warps, maxnreg=how.registers, launch_pdl=pdl,
    )  # fmt: skip
