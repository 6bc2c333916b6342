"""silu(x @ gate.T) * (x @ up.T) for many rows, for compute capability 9.0, in Gluon.

A block of threads stays on its processor and works through tiles of the result, ROWS * CONSUMERS rows by COLUMNS
columns. Its warps have roles. The producer, one warp, keeps the bulk copy engine busy: x and the weight come in steps of
BLOCK_K through a ring of STAGES in shared memory, a step's weights as COLUMNS lines of the gate above as many of the
up projection. Each consumer, four warps, has ROWS rows: one matrix instruction takes gate and up together, so a thread
holds both sums of the same outputs, and the product of the two leaves the chip instead of both.
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

from quire.kernels.triton.decode import LOG2_E
from quire.kernels.triton.launch import has_pdl, num_processors

ROWS = 64  # of a consumer: what its four warps' matrix instructions take
COLUMNS = 128  # of gate and of up
BLOCK_K = 64  # the swizzle's width, 128 bytes
GROUP_M = 12  # tiles that share their columns and run at once: with as many columns, what one wave reads is least


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    group = tile // (GROUP_M * tiles_n)
    inside = tile % (GROUP_M * tiles_n)
    size = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + inside % size, inside // size


@gluon.jit
def _produce(
    x_desc, weight_desc, x_tiles, weight_tiles, full, empty, N, steps, tiles_m, tiles_n,
    CONSUMERS: gl.constexpr, GROUP_M: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    BLOCK_K: gl.constexpr = x_tiles.shape[2]
    COLUMNS: gl.constexpr = weight_tiles.shape[1]
    stage = 0
    parity = 1
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP_M)
        row = m * (ROWS * CONSUMERS)
        if GATED:
            column = n * COLUMNS
            other = N + column
        else:
            column = 2 * n * COLUMNS
            other = column + COLUMNS
        for step in range(steps):
            mbarrier.wait(empty.index(stage), parity)
            ready = full.index(stage)
            mbarrier.expect(ready, (ROWS * CONSUMERS + 2 * COLUMNS) * BLOCK_K * 2)
            k = step * BLOCK_K
            tma.async_copy_global_to_shared(weight_desc, [column, k], ready, weight_tiles.index(2 * stage))
            tma.async_copy_global_to_shared(weight_desc, [other, k], ready, weight_tiles.index(2 * stage + 1))
            for i in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    x_desc, [row + i * ROWS, k], ready, x_tiles.index(stage * CONSUMERS + i)
                )  # fmt: skip
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1


@gluon.jit
def _gated(gate, up, LOG2_E: gl.constexpr, FAST: gl.constexpr):
    grown = 1.0 + gl.exp2(gate * -LOG2_E)
    if FAST:
        return gate * up * gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], dtype=gl.float32, is_pure=True, pack=1)
    else:
        return gate * up / grown


@gluon.jit
def _put(out_desc, out_tile, y, row, column, LAYOUT: gl.constexpr):
    tma.store_wait(0)
    gl.thread_barrier()
    out_tile.store(gl.convert_layout(y.to(out_desc.dtype), LAYOUT))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [row, column], out_tile)


@gluon.jit
def _consume(
    out_desc, x_tiles, weight_tiles, out_tiles, full, empty, steps, tiles_m, tiles_n,
    NUMBER: gl.constexpr, CONSUMERS: gl.constexpr, GROUP_M: gl.constexpr, LOG2_E: gl.constexpr,
    GATED: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    COLUMNS: gl.constexpr = out_tiles.shape[2]
    WIDTH: gl.constexpr = weight_tiles.shape[1]  # twice COLUMNS: one instruction for both
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    out_tile = out_tiles.index(NUMBER)
    stage = 0
    parity = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        before = stage
        acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        up = acc
        mbarrier.wait(full.index(stage), parity)
        x = x_tiles.index(stage * CONSUMERS + NUMBER)
        if WIDTH > COLUMNS:
            mixed = warpgroup_mma(
                x, weight_tiles.index(stage).permute([1, 0]), acc, use_acc=False, is_async=True
            )  # fmt: skip
            acc = warpgroup_mma_wait(1, deps=[mixed])
        else:
            mixed = warpgroup_mma(
                x, weight_tiles.index(2 * stage).permute([1, 0]), acc, use_acc=False, is_async=True
            )  # fmt: skip
            mixed_up = warpgroup_mma(
                x, weight_tiles.index(2 * stage + 1).permute([1, 0]), up, use_acc=False, is_async=True
            )  # fmt: skip
            acc, up = warpgroup_mma_wait(2, deps=[mixed, mixed_up])
        for _ in range(1, steps):
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
            mbarrier.wait(full.index(stage), parity)
            x = x_tiles.index(stage * CONSUMERS + NUMBER)
            if WIDTH > COLUMNS:
                mixed = warpgroup_mma(x, weight_tiles.index(stage).permute([1, 0]), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[mixed])
            else:
                mixed = warpgroup_mma(x, weight_tiles.index(2 * stage).permute([1, 0]), acc, is_async=True)
                mixed_up = warpgroup_mma(x, weight_tiles.index(2 * stage + 1).permute([1, 0]), up, is_async=True)
                acc, up = warpgroup_mma_wait(2, deps=[mixed, mixed_up])
            mbarrier.arrive(empty.index(before), count=1)
            before = stage
        acc, up = warpgroup_mma_wait(0, deps=[acc, up])
        mbarrier.arrive(empty.index(before), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1
        if WIDTH > COLUMNS:
            first, second = acc.reshape([ROWS, 2, COLUMNS]).permute([0, 2, 1]).split()
        else:
            first = acc
            second = up
        m, n = _place(tile, tiles_m, tiles_n, GROUP_M)
        row = (m * CONSUMERS + NUMBER) * ROWS
        if GATED:
            _put(out_desc, out_tile, _gated(first, second, LOG2_E, FAST), row, n * COLUMNS, OUT_LAYOUT)
        else:
            _put(out_desc, out_tile, first, row, 2 * n * COLUMNS, OUT_LAYOUT)
            _put(out_desc, out_tile, second, row, (2 * n + 1) * COLUMNS, OUT_LAYOUT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def _gated_sm90_kernel(
    x_desc, weight_desc, out_desc, M, N, K,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, LOG2_E: gl.constexpr, ONE: gl.constexpr, GATED: gl.constexpr, FAST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = weight_desc.block_type.shape[0]
    dtype: gl.constexpr = x_desc.dtype
    tiles_m = (M + ROWS * CONSUMERS - 1) // (ROWS * CONSUMERS)
    if GATED:
        tiles_n = (N + COLUMNS - 1) // COLUMNS
    else:
        tiles_n = (N + 2 * COLUMNS - 1) // (2 * COLUMNS)
    steps = (K + BLOCK_K - 1) // BLOCK_K
    COUNTER: gl.constexpr = mbarrier.MBarrierLayout()
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS, BLOCK_K], x_desc.layout)
    halves = gl.allocate_shared_memory(dtype, [2 * STAGES, COLUMNS, BLOCK_K], weight_desc.layout)
    weight_tiles = halves
    if ONE:
        weight_tiles = halves._reinterpret(dtype, [STAGES, 2 * COLUMNS, BLOCK_K], weight_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, COLUMNS], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    if PDL:  # for all warps: the others start after this
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (out_desc, x_tiles, weight_tiles, out_tiles, full, empty, steps, tiles_m, tiles_n, FIRST, CONSUMERS, GROUP_M, LOG2_E, GATED, FAST)),
                (_consume, (out_desc, x_tiles, weight_tiles, out_tiles, full, empty, steps, tiles_m, tiles_n, SECOND, CONSUMERS, GROUP_M, LOG2_E, GATED, FAST)),
                (_produce, (x_desc, weight_desc, x_tiles, halves, full, empty, N, steps, tiles_m, tiles_n, CONSUMERS, GROUP_M, GATED)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (out_desc, x_tiles, weight_tiles, out_tiles, full, empty, steps, tiles_m, tiles_n, FIRST, CONSUMERS, GROUP_M, LOG2_E, GATED, FAST)),
                (_consume, (out_desc, x_tiles, weight_tiles, out_tiles, full, empty, steps, tiles_m, tiles_n, SECOND, CONSUMERS, GROUP_M, LOG2_E, GATED, FAST)),
                (_consume, (out_desc, x_tiles, weight_tiles, out_tiles, full, empty, steps, tiles_m, tiles_n, THIRD, CONSUMERS, GROUP_M, LOG2_E, GATED, FAST)),
                (_produce, (x_desc, weight_desc, x_tiles, halves, full, empty, N, steps, tiles_m, tiles_n, CONSUMERS, GROUP_M, GATED)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip


def product(x, weight, out, gated, consumers=3, stages=3, block_k=64, one=False, group_m=GROUP_M, fast=True, warm=False):
    """x [m, k] @ weight.T → out; for measuring."""
    (m, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    layout = gl.NVMMASharedLayout(2 * block_k, 16, 2)
    arguments = (
        TensorDescriptor.from_tensor(x, [ROWS, block_k], layout),
        TensorDescriptor.from_tensor(weight, [COLUMNS, block_k], layout),
        TensorDescriptor.from_tensor(out, [ROWS, COLUMNS], gl.NVMMASharedLayout(128, 16, 2)),
        m, n, k,
    )
    tiles = -(-m // (ROWS * consumers)) * -(-n // (COLUMNS if gated else 2 * COLUMNS))
    grid = (min(num_processors(x.device), tiles),)
    pdl = has_pdl(x.device)
    options = dict(
        CONSUMERS=consumers, STAGES=stages, GROUP_M=group_m, LOG2_E=LOG2_E, ONE=one, GATED=gated, FAST=fast, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )
    if warm:
        return _gated_sm90_kernel.warmup(*arguments, grid=grid, **options)
    _gated_sm90_kernel[grid](*arguments, **options)
    return out
