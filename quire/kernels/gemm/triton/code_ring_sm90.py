"""x @ weight.T for one row and a weight in integers of 4 bits, with norm, gate and residual sum, for compute capability
9.0, in Gluon: the ring of `fp8_ring_sm90`, for words of codes.

Making floats of codes would keep a processor busier than memory keeps it waiting. So products are of integers: half a
shift and a logical instruction make four bytes of four codes, 16 times what they stand for. x is kept in integers of 16
bits, by blocks of 128 columns each to its own largest number, and their upper and lower bytes are columns of the matrix
units, which take no fewer than eight: what rounds x is 2^-16 of a block's largest, far below what bfloat16 does. All of
a block's products and their sums are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gemm.codes import BLOCK, Codes
from quire.kernels.gemm.triton.code_words import word_layout
from quire.kernels.gemm.triton.codes import arguments
from quire.kernels.gemm.triton.fp8_ring_sm90 import of_lines
from quire.kernels.gemm.triton.skinny_registers import _mma
from quire.kernels.triton.launch import cdiv, has_pdl, num_processors

WORDS_IN_SHARED = gl.NVMMASharedLayout(128, 32, 3)
SCALES_IN_SHARED = gl.NVMMASharedLayout(0, 16, 3)
SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_COLUMNS = 32768  # of x that is kept, two bytes each
REGISTERS = 64  # of a thread: two programs leave room for others beside them
OPTIONS = {"PRODUCER_REGISTERS": 24, "FINISHER_REGISTERS": 40}


@gluon.constexpr_function
def _ring_layout(warps):
    """Of words [2, 8 lines, 16 warps] what `word_layout` has of [warps, 16 lines, 16]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [1, 0, 0]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 0, 16 << i] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[2, 8, 16 * warps],
    )


@gluon.constexpr_function
def _scale_layout(warps):
    """Of scales [2, 8 lines, warps], as lines of sums are shared out."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0, 0]],
        lane_bases=[[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 0, 1 << i] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[2, 8, warps],
    )


@gluon.constexpr_function
def _sums_layout(warps):
    """Of sums [warps, 16 lines, 4 times the same]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 8, 0]],
        lane_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1 << i, 0, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[warps, 16, 4],
    )


@gluon.constexpr_function
def _row_layout(warps):
    """Of a row's 512 warps numbers: a thread has 8 in a row, and those 16 on."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4], [16]],
        lane_bases=[[8], [32], [64], [128], [256]],
        warp_bases=[[512 << i] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[512 * warps],
    )


@gluon.constexpr_function
def _bytes_layout(warps):
    """Of a row's bytes as they are kept, [4 warps, 64]: of each 32 columns a thread has eight, upper or lower ones."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [0, 0], [0, 0]],
        warp_bases=[[4 << i, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[4 * warps, 64],
    )


@gluon.constexpr_function
def _columns_layout(warps):
    """Of the same [warps, 128, 4, 2], four times what there is."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [0, 16, 0, 0], [0, 32, 0, 0], [0, 64, 0, 0]],
        lane_bases=[[0, 4, 0, 0], [0, 8, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 2, 0]],
        warp_bases=[[1 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[warps, 128, 4, 2],
    )


@gluon.constexpr_function
def _put_together(late):
    """Of a word every other code, less 8 and times 16, in a byte."""
    first = "mov.b32 w, $1; " if late else "shl.b32 w, $1, 4; "
    return "{ .reg .b32 w; " + first + "lop3.b32 $0, w, 0xF0F0F0F0, 0x80808080, 0x6a; }"


@gluon.jit
def _operands(words, LAYOUT: gl.constexpr):
    """words [2, 8, 16 warps] → bytes [warps, 16, 128], all in the threads that they are in."""
    W: gl.constexpr = words.shape[2] // 16
    EARLY: gl.constexpr = _put_together(False)
    LATE: gl.constexpr = _put_together(True)
    words = words.reshape([16, W, 16]).permute([1, 0, 2])
    words = gl.convert_layout(words, word_layout(16, W, True), assert_trivial=True)
    two = gl.join(words, words)
    four = gl.join(two, two)
    early = gl.inline_asm_elementwise(EARLY, "=r,r,r,r,r", [four], dtype=gl.int8, is_pure=True, pack=4)
    late = gl.inline_asm_elementwise(LATE, "=r,r,r,r,r", [four], dtype=gl.int8, is_pure=True, pack=4)
    y = gl.join(early, late).reshape([W, 16, 4, 4, 4, 2]).permute([0, 1, 3, 5, 2, 4]).reshape([W, 16, 128])
    return gl.convert_layout(y, LAYOUT, assert_trivial=True)


@gluon.jit
def _x_operand(kept, LAYOUT: gl.constexpr):
    """What is kept of a step → [warps, 128, 8], upper and lower bytes in turns."""
    W: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = _columns_layout(W)
    x = kept.load(_bytes_layout(W)).reshape([W, 4, 2, 4, 2, 4]).permute([0, 1, 4, 3, 5, 2]).reshape([W, 128, 2])
    x = gl.convert_layout(x, gl.SliceLayout(2, COLUMNS), assert_trivial=True)
    x = gl.broadcast(x[:, :, None, :], gl.zeros([W, 128, 4, 2], gl.int8, COLUMNS))[0].reshape([W, 128, 8])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _parts(ptr, K, PASSES: gl.constexpr):
    """A row, [512 warps] at a time."""
    W: gl.constexpr = gl.num_warps()
    parts = ()
    for i in gl.static_range(PASSES):
        k = i * 512 * W + gl.arange(0, 512 * W, _row_layout(W))
        parts += (gl.load(ptr + k, k < K, 0.0),)
    return parts


@gluon.jit
def _keep_row(xs, gains, kept, factors, sums, squared, NORM: gl.constexpr, ZERO: gl.constexpr):
    """The row times the norm's gains to `kept` [passes, by 32 columns, 2 · 32], upper and lower bytes; to `factors`
    [passes, blocks, 1] what 16 times them is to be multiplied by, to `sums` 16 times their sums; to `squared` [warps]
    sums of squares."""
    W: gl.constexpr = gl.num_warps()
    PASSES: gl.constexpr = kept.shape[0]
    LARGEST: gl.constexpr = 32639.0  # of two bytes with signs
    ROUND: gl.constexpr = 12582912.0  # 1.5 · 2^23, behind whose bits stands what is added, rounded
    LESS: gl.constexpr = 0x8080 - 0x4B400000
    squares = gl.zeros([512 * W], gl.float32, _row_layout(W))
    for i in gl.static_range(PASSES):
        x = xs[i].to(gl.float32)
        if NORM:
            squares += x * x
            x = x * gains[i].to(gl.float32)
        blocks = x.reshape([4 * W, 128])
        # As bits, of which those of no number are the largest.
        largest = gl.max(blocks.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        largest = gl.maximum(largest, 0x0D800000).to(gl.float32, bitcast=True)  # 2^-100
        factors.index(i).store((largest * (1 / (16 * LARGEST)))[:, None])
        whole = blocks * (LARGEST / largest)[:, None] + ROUND
        digits = whole.to(gl.int32, bitcast=True) + LESS
        if ZERO:
            sums.index(i).store((gl.sum(digits - 0x8080, axis=1) * 16).to(gl.float32)[:, None])
        digits = digits ^ 0x8080  # each a byte with a sign
        y = gl.join((digits >> 8).to(gl.int8), digits.to(gl.int8))
        # Column 32 a + 16 b + 8 c + 2 d + e, of thread d's word a, is byte 2 e + b of codes c: see `codes`.
        y = y.reshape([16 * W, 2, 2, 4, 2, 2]).permute([0, 5, 3, 2, 4, 1])
        kept.index(i).store(y.reshape([16 * W, 64]))
    if NORM:
        squared.store(gl.sum(squares.reshape([W, 512]), axis=1))


@gluon.jit
def _of_step(
    ptr, count, group, groups, N, blocks, STEPS: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scales, or zeros, of a program's step number `count`."""
    unit, block = group + count // STEPS * groups, count % STEPS * gl.num_warps()
    return of_lines(ptr, unit, block, N, blocks, GATED, LAYOUT)


@gluon.jit
def _consume(
    x_ptr, scale_ptr, zero_ptr, gain_ptr, ring, scales, kept, factors, block_sums, squared, parts, full, empty, done,
    taken, N, blocks, group, groups, own,
    K: gl.constexpr, STEPS: gl.constexpr, COPIED: gl.constexpr, ZERO: gl.constexpr, NORM: gl.constexpr,
    GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = gl.num_warps()
    STAGES: gl.constexpr = full.shape[0]
    MMA: gl.constexpr = _mma(W)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=4)
    WORDS: gl.constexpr = _ring_layout(W)
    SUMS: gl.constexpr = _sums_layout(W)
    LINES: gl.constexpr = gl.SliceLayout(2, SUMS)
    SCALES: gl.constexpr = _scale_layout(W)
    PASSES: gl.constexpr = kept.shape[0]
    gains = ()
    if NORM:  # no kernel of a step writes them
        gains = _parts(gain_ptr, K, PASSES)
    # They are asked for two steps ahead, and here as soon as can be.
    if not COPIED:
        scale = _of_step(scale_ptr, 0, group, groups, N, blocks, STEPS, GATED, LINES)
        next_scale = _of_step(scale_ptr, 1, group, groups, N, blocks, STEPS, GATED, LINES)
    if ZERO:
        zero = _of_step(zero_ptr, 0, group, groups, N, blocks, STEPS, GATED, LINES)
        next_zero = _of_step(zero_ptr, 1, group, groups, N, blocks, STEPS, GATED, LINES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _keep_row(_parts(x_ptr, K, PASSES), gains, kept, factors, block_sums, squared, NORM, ZERO)
    gl.thread_barrier()
    rows = kept._reinterpret(gl.int8, [PASSES * 4, 4 * W, 64], kept.type.layout)
    powers = factors._reinterpret(gl.float32, [PASSES * 4, W, 1], factors.type.layout)
    sums = block_sums._reinterpret(gl.float32, [block_sums.shape[0] * 4, W, 1], factors.type.layout)
    stage = 0
    parity = 0
    before = 0
    for i in range(own):
        acc = gl.zeros([W, 16, 4], gl.float32, SUMS)
        for step in range(STEPS):
            after = i * STEPS + step + 2
            if not COPIED:
                late_scale = _of_step(scale_ptr, after, group, groups, N, blocks, STEPS, GATED, LINES)
            if ZERO:
                late_zero = _of_step(zero_ptr, after, group, groups, N, blocks, STEPS, GATED, LINES)
            mbarrier.wait(full.index(stage), parity)
            words = ring.index(stage).load(WORDS)
            if COPIED:
                scale = scales.index(stage).load(SCALES).reshape([16, W]).permute([1, 0])
                scale = gl.convert_layout(scale, LINES, assert_trivial=True)
            # The step before, which has been computed with. Loads of this one may be under way still when all threads
            # have met, and what the copy engine writes is in no order with them.
            mbarrier.arrive(empty.index(before), count=1, pred=after > 2)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
            nothing = gl.zeros([W, 16, 8], gl.int32, MMA)
            product = mma_v2(_operands(words, LEFT), _x_operand(rows.index(step), RIGHT), nothing)
            upper, lower = product.reshape([W, 16, 4, 2]).split()
            both = gl.convert_layout(upper * 256 + lower, SUMS, assert_trivial=True).to(gl.float32)
            if ZERO:
                both -= (sums.index(step).load(LINES) * (zero.to(gl.float32) - 8))[:, :, None]
                zero = next_zero
                next_zero = late_zero
            acc += both * (scale.to(gl.float32) * powers.index(step).load(LINES))[:, :, None]
            if not COPIED:
                scale = next_scale
                next_scale = late_scale
        mbarrier.wait(taken.index(i % 2), i // 2 % 2 ^ 1)
        parts.index(i % 2).store(acc)
        mbarrier.arrive(done.index(i % 2), count=1)


@gluon.jit
def _produce(
    w_desc, scale_desc, ring, scales, full, empty, group, groups, own,
    STEPS: gl.constexpr, COPIED: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Sends for each step of each unit: twice 8 lines, neighbours, or gates and their ups, and their scales."""
    STAGES: gl.constexpr = full.shape[0]
    WIDTH: gl.constexpr = ring.shape[3]
    BLOCKS: gl.constexpr = scales.shape[3]
    stage = 0
    parity = 1
    for i in range(own):
        unit = group + i * groups
        for step in range(STEPS):
            mbarrier.wait(empty.index(stage), parity)
            mbarrier.expect(full.index(stage), 2 * 8 * WIDTH * 4 + (2 * 8 * BLOCKS * 2 if COPIED else 0))
            first = 0 if GATED else unit * 2
            line = unit * 8 if GATED else 0
            at = [first, line, step * WIDTH]
            tma.async_copy_global_to_shared(w_desc, at, full.index(stage), ring.index(stage))
            if COPIED:
                at = [first, line, step * BLOCKS]
                tma.async_copy_global_to_shared(scale_desc, at, full.index(stage), scales.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1


@gluon.jit
def _finish(
    outer_ptr, bias_ptr, out_ptr, squared, parts, done, taken, N, eps, group, groups, own,
    K: gl.constexpr, NORM: gl.constexpr, OUTER: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Adds up what the consumer's warps have of a unit, while these are at the next one."""
    OUTPUTS: gl.constexpr = 8 if GATED else 16
    W: gl.constexpr = parts.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([W, 1, 1], [1, 16, 2], [1, 1, 1], [1, 2, 0])
    RESULT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    output = gl.arange(0, OUTPUTS, gl.SliceLayout(1, RESULT))[:, None]
    if PDL and RESIDUAL:
        gdc_wait()
    for i in range(own):
        n = (group + i * groups) * OUTPUTS + output
        there = n < N
        residual = 0.0
        if RESIDUAL:
            residual = gl.load(out_ptr + n, there, 0.0).to(gl.float32)
        mbarrier.wait(done.index(i % 2), i // 2 % 2)
        sums = parts.index(i % 2).slice(0, 1, 2)
        left = 1.0
        if NORM:
            left = gl.rsqrt(gl.sum(squared.load(gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), axis=0) / K + eps)
        y = gl.sum(sums.slice(0, OUTPUTS, 1).load(LAYOUT), axis=0) * left
        if GATED:
            up = gl.sum(sums.slice(OUTPUTS, OUTPUTS, 1).load(LAYOUT), axis=0) * left
        mbarrier.arrive(taken.index(i % 2), count=1)
        if OUTER:
            y *= gl.load(outer_ptr + n, there, 0.0)
        if BIAS:
            y += gl.load(bias_ptr + n, there, 0.0).to(gl.float32)
        if GATED:
            if OUTER:
                up *= gl.load(outer_ptr + N + n, there, 0.0)
            if BIAS:
                up += gl.load(bias_ptr + N + n, there, 0.0).to(gl.float32)
            y = y / (1.0 + gl.exp(-y)) * up
        if RESIDUAL:
            y += residual
        gl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), there)


@gluon.jit(do_not_specialize=["N", "blocks", "units"])
def _code_ring_kernel(
    x_ptr, w_desc, scale_desc, scale_ptr, zero_ptr, outer_ptr, bias_ptr, gain_ptr, out_ptr, N, blocks, units, eps,
    K: gl.constexpr, STAGES: gl.constexpr, COPIED: gl.constexpr, ZERO: gl.constexpr, OUTER: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, FINISHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = 16 * W  # words of a step: each warp has a block
    STEPS: gl.constexpr = (K + 8 * WIDTH - 1) // (8 * WIDTH)
    PASSES: gl.constexpr = (STEPS + 3) // 4
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 8, [1, 0])  # neither writers nor readers share banks
    DEEP: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, 2, 8, WIDTH], w_desc.layout)
    scales = ring
    if COPIED:
        scales = gl.allocate_shared_memory(scale_desc.dtype, [STAGES, 2, 8, W], scale_desc.layout)
    kept = gl.allocate_shared_memory(gl.int8, [PASSES, 16 * W, 64], ROWS)
    factors = gl.allocate_shared_memory(gl.float32, [PASSES, 4 * W, 1], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    block_sums = factors
    if ZERO:
        block_sums = gl.allocate_shared_memory(gl.float32, [PASSES, 4 * W, 1], factors.type.layout)
    squared = gl.allocate_shared_memory(gl.float32, [W], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    parts = gl.allocate_shared_memory(gl.float32, [2, W, 16, 4], DEEP)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(done.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    group, groups = gl.program_id(0), gl.num_programs(0)
    own = (units - group + groups - 1) // groups
    gl.warp_specialize(
        [
            (_consume, (
                x_ptr, scale_ptr, zero_ptr, gain_ptr, ring, scales, kept, factors, block_sums, squared, parts, full,
                empty, done, taken, N, blocks, group, groups, own, K, STEPS, COPIED, ZERO, NORM, GATED, PDL,
            )),
            (_produce, (w_desc, scale_desc, ring, scales, full, empty, group, groups, own, STEPS, COPIED, GATED)),
            (_finish, (
                outer_ptr, bias_ptr, out_ptr, squared, parts, done, taken, N, eps, group, groups, own, K, NORM, OUTER,
                GATED, BIAS, RESIDUAL, PDL,
            )),
        ],
        [1, 1],
        [PRODUCER_REGISTERS, FINISHER_REGISTERS],
    )  # fmt: skip


class Plan(NamedTuple):
    """stages: of the ring. programs: on a processor. warps: that have 128 columns of a step each."""

    stages: int
    programs: int
    warps: int


def _described(rows: torch.Tensor, gated: bool, width: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """8 lines here and 8 there."""
    (lines, columns), stride = rows.shape, rows.stride(0)
    shape, apart = ([2, lines // 2, columns], lines // 2) if gated else ([lines // 8, 8, columns], 8)
    return TensorDescriptor(rows, shape, [apart * stride, stride, 1], [2, 8, width], layout)


def takes(x: torch.Tensor, weight: Codes, gated: bool, residual: bool) -> bool:
    """Whether `linear` takes these: integers of 4 bits by blocks, whose words the copy engine can read, for one row
    that can be kept; and it pays."""
    lines, columns = len(weight.codes), weight.columns
    whole = columns % BLOCK == 0 and lines % (16 if gated else 8) == 0 and x.stride(1) == 1
    alike = weight.kind == "int4" and weight.group == BLOCK and weight.scale.dtype in SCALE_TYPES
    moved = weight.codes.data_ptr() % 16 == 0
    return len(x) == 1 and alike and whole and moved and columns <= MOST_COLUMNS and _pays(lines, columns, residual)


def _can_be_copied(scale: torch.Tensor) -> bool:
    """Whether the copy engine can bring them with the words."""
    return scale.element_size() == 2 and scale.stride(0) % 8 == 0 and scale.data_ptr() % 16 == 0


def _pays(n: int, k: int, residual: bool) -> bool:
    """As measured on an H200 for the products of 1B to 70B models. Short ones are over before a ring has filled, and
    those without a norm have less to gain."""
    return k >= 2048 and (n * k >= 30 << 20 or k > 5120 if residual else n * k >= 8 << 20)


def plan(k: int, *, gated: bool) -> Plan:
    """As measured for the same products, and in steps of an 8B model. Where there are many lines two programs do
    better: one computes while the other waits."""
    if (gated and k < 8192) or 5 * (-k % 2048) > k:  # or too much would be computed for nothing
        return Plan(5, 2, 8)
    if k <= 4096:
        return Plan(3, 1, 16)
    return Plan(6 if 8192 < k <= 20480 else 5, 1, 16)  # what comes before a long one leaves memory idle


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
    """x [1, k] → out [1, n]; with `residual` the result is added to what stands there. weight: that it `takes`. See
    `quire.kernels.gemm.linear`."""
    k, n = x.shape[1], out.shape[1]
    how = how or plan(k, gated=gated)
    gain, eps = norm or (x, 0.0)
    units = cdiv(n, 8 if gated else 16)
    _, scale, zero, outer, _ = arguments(weight)
    copied, pdl = _can_be_copied(scale), has_pdl(x.device)
    words = _described(weight.codes.view(torch.int32), gated, 16 * how.warps, WORDS_IN_SHARED)
    scales = _described(scale, gated, how.warps, SCALES_IN_SHARED) if copied else scale
    _code_ring_kernel[(min(units, how.programs * num_processors(x.device)),)](
        x, words, scales, scale, zero, outer, x if bias is None else bias, gain, out, n, scale.shape[1], units, eps,
        K=k, STAGES=how.stages, COPIED=copied, ZERO=weight.zero is not None, OUTER=weight.outer is not None,
        NORM=norm is not None, GATED=gated, BIAS=bias is not None, RESIDUAL=residual, PDL=pdl, maxnreg=REGISTERS,
        num_warps=how.warps, launch_pdl=pdl, **OPTIONS,
    )  # fmt: skip
    return out
