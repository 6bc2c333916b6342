"""x @ weight.T for 17 to 128 rows, for compute capability 9.0, in Gluon: the weight is there before x is.

A program owns some lines of the weight (or as many of gate and of up), all rows, and one of the parts of K. Its
producer, one warp, keeps the bulk copy engine busy: steps of K come through a ring in shared memory, a processor's
whole one. It fills that with the weight from its start on, which no kernel of a step writes, and sends for x once the
kernels before are done. So memory works while a sum over ranks travels. (Weights in the L2 cache ahead of time gain
nothing: what goes from there to the processors, the weight once and x once a program, is what takes the time.)

Consumers, four warps each, have 64 rows each. Sums of a part of K are results of their own, for who adds them up on
the way: no workspace, and nobody waits.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.attention.triton.decode import LOG2_E
from quire.kernels.gemm.triton.pipeline_sm90 import SWIZZLED, halves, swish
from quire.kernels.gemm.triton.plan import SHARED_BYTES, Ahead
from quire.kernels.triton.descriptors import described
from quire.kernels.triton.launch import cdiv, has_pdl
from quire.kernels.triton.launches import launch

ROWS, BLOCK_K = 64, 64  # of a tile
# The copy engine takes longer for rows beyond x than for others: boxes with none of x read its first rows.
BOX = 16
AT_ONCE = 2  # tiles of a step
STEP = AT_ONCE * BLOCK_K
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 152
# A thread's, in the mean of one consumer's programs and of two consumers': the kernel before has room beside them.
REGISTERS = (128, 112)


@gluon.jit
def _ask(desc, tiles, first, apart, k, full, stage, there, TIMES: gl.constexpr):
    """For a step's columns from k on: of as many lines as a tile has from `first` on, and TIMES - 1 times `apart`; for
    the first again where lines are not `there`."""
    BLOCK_K: gl.constexpr = tiles.shape[2]
    AT_ONCE: gl.constexpr = tiles.shape[0] // (TIMES * full.shape[0])
    for at in gl.static_range(AT_ONCE):
        for i in gl.static_range(TIMES):
            tile = tiles.index((AT_ONCE * stage + at) * TIMES + i)
            line = gl.where(i * apart < there, first + i * apart, first)
            tma.async_copy_global_to_shared(desc, [line, k + at * BLOCK_K], full.index(stage), tile)


@gluon.jit
def _produce(
    x_desc, weight_desc, x_boxes, weight_tiles, full, empty, line, apart, k, M, steps,
    BOXES: gl.constexpr, TIMES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Steps of columns from k on; there are as many of them as stages at least. BOXES: of x, a tile of columns."""
    STAGES: gl.constexpr = full.shape[0]
    BOX: gl.constexpr = x_boxes.shape[1]
    AT_ONCE: gl.constexpr = x_boxes.shape[0] // (BOXES * STAGES)
    STEP: gl.constexpr = AT_ONCE * x_boxes.shape[2]
    BYTES: gl.constexpr = (BOXES * BOX + TIMES * weight_tiles.shape[1]) * STEP * 2
    ALL: gl.constexpr = 1 << 30
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), BYTES)
        _ask(weight_desc, weight_tiles, line, apart, k + i * STEP, full, i, ALL, TIMES)
    if PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        _ask(x_desc, x_boxes, 0, BOX, k + i * STEP, full, i, M, BOXES)
    stage = 0
    parity = 0
    for step in range(STAGES, steps):
        mbarrier.wait(empty.index(stage), parity)
        mbarrier.expect(full.index(stage), BYTES)
        _ask(x_desc, x_boxes, 0, BOX, k + step * STEP, full, stage, M, BOXES)
        _ask(weight_desc, weight_tiles, line, apart, k + step * STEP, full, stage, ALL, TIMES)
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1


@gluon.jit
def _consume(
    out_ptr, x_boxes, weight_tiles, full, empty, line, column, M, N, steps, out_stride,
    NUMBER: gl.constexpr, ROWS: gl.constexpr, TIMES: gl.constexpr, CONSUMERS: gl.constexpr, LOG2_E: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_K: gl.constexpr = x_boxes.shape[2]
    TILES: gl.constexpr = x_boxes.shape[0] * x_boxes.shape[1] // ROWS
    AT_ONCE: gl.constexpr = TILES // (CONSUMERS * STAGES)
    LINES: gl.constexpr = weight_tiles.shape[1]
    WIDTH: gl.constexpr = TIMES * LINES
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    both = weight_tiles._reinterpret(weight_tiles.dtype, [AT_ONCE * STAGES, WIDTH, BLOCK_K], weight_tiles.layout)
    x_tiles = x_boxes._reinterpret(x_boxes.dtype, [TILES, ROWS, BLOCK_K], x_boxes.layout)
    stage = 0
    parity = 0
    before = 0
    sums = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
    for step in range(steps):
        mbarrier.wait(full.index(stage), parity)
        mixed = sums
        for at in gl.static_range(AT_ONCE):
            x = x_tiles.index((AT_ONCE * stage + at) * CONSUMERS + NUMBER)
            mixed = warpgroup_mma(x, both.index(AT_ONCE * stage + at).permute([1, 0]), mixed, is_async=True)
        sums = warpgroup_mma_wait(AT_ONCE, deps=[mixed])
        if step > 0:
            mbarrier.arrive(empty.index(before), count=1)
        before = stage + 0  # a new value in every turn: with the one it has ahead of the loop, it would stay that
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1
    y = warpgroup_mma_wait(0, deps=[sums])
    if TIMES == 2:
        gate, up = halves(y)
        y = swish(gate, up, LOG2_E)
    ACROSS: gl.constexpr = LINES // 8
    WRITTEN: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    y = gl.convert_layout(y.to(out_ptr.dtype.element_ty), WRITTEN)
    rows = NUMBER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WRITTEN))
    columns = gl.arange(0, LINES, gl.SliceLayout(0, WRITTEN))
    there = (rows < M)[:, None] & (line + columns < N)[None, :]
    gl.store(out_ptr + rows.to(gl.int64)[:, None] * out_stride + (column + columns)[None, :], y, there)


@gluon.jit(do_not_specialize=["M", "steps"])
def _ahead_kernel(
    x_desc, weight_desc, out_ptr, M, N, steps, out_stride,
    ROWS: gl.constexpr, STAGES: gl.constexpr, AT_ONCE: gl.constexpr, GATED: gl.constexpr, CONSUMERS: gl.constexpr,
    LOG2_E: gl.constexpr, PDL: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    BOX: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BOXES: gl.constexpr = CONSUMERS * ROWS // BOX
    LINES: gl.constexpr = weight_desc.block_type.shape[0]
    COUNTER: gl.constexpr = mbarrier.MBarrierLayout()
    TIMES: gl.constexpr = 2 if GATED else 1
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    if PDL:
        gdc_launch_dependents()
    x_boxes = gl.allocate_shared_memory(x_desc.dtype, [STAGES * AT_ONCE * BOXES, BOX, BLOCK_K], x_desc.layout)
    weight_tiles = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * AT_ONCE * TIMES, LINES, BLOCK_K], weight_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    line, part = gl.program_id(0) * LINES, gl.program_id(1)
    column, k = part * N + line, part * steps * (AT_ONCE * BLOCK_K)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    out_ptr, x_boxes, weight_tiles, full, empty, line, column, M, N, steps, out_stride,
                    FIRST, ROWS, TIMES, CONSUMERS, LOG2_E,
                )),
                (_produce, (
                    x_desc, weight_desc, x_boxes, weight_tiles, full, empty, line, N, k, M, steps, BOXES, TIMES, PDL,
                )),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    out_ptr, x_boxes, weight_tiles, full, empty, line, column, M, N, steps, out_stride,
                    FIRST, ROWS, TIMES, CONSUMERS, LOG2_E,
                )),
                (_consume, (
                    out_ptr, x_boxes, weight_tiles, full, empty, line, column, M, N, steps, out_stride,
                    SECOND, ROWS, TIMES, CONSUMERS, LOG2_E,
                )),
                (_produce, (
                    x_desc, weight_desc, x_boxes, weight_tiles, full, empty, line, N, k, M, steps, BOXES, TIMES, PDL,
                )),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def stages(m: int, k: int, plan: Ahead, *, gated: bool) -> int:
    """Steps in the ring: what a processor has room for beside a tile that leaves it."""
    consumers, tiles = cdiv(m, ROWS), (2 if gated else 1) * plan.lines
    room = SHARED_BYTES - consumers * ROWS * plan.lines * 2
    return min(room // ((consumers * ROWS + tiles) * STEP * 2), cdiv(cdiv(k, STEP), plan.parts))


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, plan: Ahead, *, gated: bool) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T → out [m, parts * n], m ≤ 128, each row's parts of K one after the other; gated:
    weight [2n, k] = [gate | up], the result silu(gate) * up, of one part.

    x and weight: bfloat16 or float16, rows contiguous and a multiple of 8 elements apart; rows of out contiguous.
    """
    (m, k), n = x.shape, len(weight) // (2 if gated else 1)
    consumers, pdl = cdiv(m, ROWS), has_pdl(x.device)
    launch(_ahead_kernel, (cdiv(n, plan.lines), plan.parts),
        described(TensorDescriptor, x, (BOX, BLOCK_K), SWIZZLED),
        described(TensorDescriptor, weight, (plan.lines, BLOCK_K), SWIZZLED),
        out, m, n, cdiv(cdiv(k, STEP), plan.parts), out.stride(0),
        ROWS=ROWS, STAGES=stages(m, k, plan, gated=gated), AT_ONCE=AT_ONCE, GATED=gated, CONSUMERS=consumers,
        LOG2_E=LOG2_E, PDL=pdl, PRODUCER_REGISTERS=PRODUCER_REGISTERS, CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        num_warps=4, maxnreg=REGISTERS[consumers - 1], launch_pdl=pdl,
    )  # fmt: skip
    return out
