"""x @ weight.T for decode batches of more than a hundred rows, for compute capability 9.0, in Gluon.

At such sizes neither the weight's bytes nor the arithmetic alone decide, but how evenly both are spread. So the result
is cut into few large tiles, CONSUMERS · 64 outputs by up to 256 rows, which ask least of the L2 cache, and every block
of threads gets the same share of all tiles' steps along K, wherever that begins and ends (stream-K: Osama et al.,
2023). Who has not all of a tile's steps leaves its sums in a workspace; when all are there, the tile's blocks have a
part of its rows each and add them up, always in order of K: a result does not depend on who came when.

The weight is the operand whose lines the matrix units take 64 at a time, x the one of up to 256 columns. Of a gated
product the lines are 8 of gate and 8 of up in turn, which the copy engine sees to: so the two that belong together end
up in the same thread. The warps of a block have roles, as in `wide_gemm_sm90`: one brings tiles, and each consumer,
four warps, has 64 lines of the weight. With programmatic dependent launch the weight is on its way before the wait.
"""

from __future__ import annotations

from functools import cache

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
from quire.kernels.triton.stream_gemm_table import Config

LINES, BLOCK_K, CHUNK = 64, 64, 32  # lines of the weight a consumer, columns of K a step, rows of x stored at a time
MAX_BLOCKS = 132
MAX_TILES = 1024


@gluon.jit
def _asm(TEXT: gl.constexpr):
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_until(counter, target):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 v; again: ld.acquire.gpu.global.b32 v, [$1]; setp.lt.s32 p, v, $2; @p bra again; "
        "mov.b32 $0, v; }", "=r,l,r", [counter.to(gl.uint64, bitcast=True), target], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _share(block, total):
    """The steps, of those of all tiles one after another, that a block has: from, to."""
    blocks = gl.num_programs(0)
    return block * total // blocks, (block + 1) * total // blocks


@gluon.jit
def _block_of(step, total):
    return ((step + 1) * gl.num_programs(0) - 1) // total


@gluon.jit
def _bring_weight(
    weight_desc, weight_tiles, ready, stage, n, k, GATED: gl.constexpr, CONSUMERS: gl.constexpr, LINES: gl.constexpr
):
    for i in gl.static_range(CONSUMERS):
        place = weight_tiles.index(stage * CONSUMERS + i)
        line = (n * CONSUMERS + i) * LINES
        if GATED:
            tma.async_copy_global_to_shared(weight_desc, [line // 16, 0, 0, k], ready, place)
        else:
            tma.async_copy_global_to_shared(weight_desc, [line, k], ready, place)


@gluon.jit
def _produce(
    x_desc, rest_desc, weight_desc, x_tiles, rest_tiles, weight_tiles, full, empty, steps, tiles_m, total,
    GATED: gl.constexpr, CONSUMERS: gl.constexpr, REST: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    BLOCK_K: gl.constexpr = x_tiles.shape[2]
    LINES: gl.constexpr = 64
    BYTES: gl.constexpr = (ROWS + REST + CONSUMERS * LINES) * BLOCK_K * 2
    begin, end = _share(gl.program_id(0), total)
    for stage in gl.static_range(STAGES):
        step = begin + stage
        if step < end:
            mbarrier.expect(full.index(stage), BYTES)
            _bring_weight(
                weight_desc, weight_tiles, full.index(stage), stage, step // steps // tiles_m, step % steps * BLOCK_K,
                GATED, CONSUMERS, LINES,
            )  # fmt: skip
    if PDL:
        _asm("griddepcontrol.wait; // $0")
    stage = 0
    parity = 1
    for step in range(begin, end):
        tile = step // steps
        k = step % steps * BLOCK_K
        ready = full.index(stage)
        if step - begin >= STAGES:
            mbarrier.wait(empty.index(stage), parity)
            mbarrier.expect(ready, BYTES)
            _bring_weight(weight_desc, weight_tiles, ready, stage, tile // tiles_m, k, GATED, CONSUMERS, LINES)
        row = tile % tiles_m * (ROWS + REST)
        tma.async_copy_global_to_shared(x_desc, [row, k], ready, x_tiles.index(stage))
        if REST > 0:
            tma.async_copy_global_to_shared(rest_desc, [row + ROWS, k], ready, rest_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1


@gluon.constexpr_function
def _halvings(width, part):
    return (width // part).bit_length() - 1


@gluon.jit
def _halves(x):
    LINES: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] // 2
    return x.reshape([LINES, 2, HALF]).permute([0, 2, 1]).split()


@gluon.jit
def _chunks(acc, CHUNK: gl.constexpr):
    """Columns of `acc`, CHUNK at a time: each thread has a part of each."""
    TIMES: gl.constexpr = _halvings(acc.shape[1], CHUNK)
    chunks = (acc,)
    for _ in gl.static_range(TIMES):
        halves = ()
        for i in gl.static_range(len(chunks)):
            halves += _halves(chunks[i])
        chunks = halves
    return chunks


@gluon.jit
def _to_memory_order(chunk, ORDER: gl.constexpr):
    """[64, columns] → [elements / 4, 4] in which a thread's four lie together, and those of a warp: as wide stores."""
    CHUNK: gl.constexpr = chunk.shape[1]
    parts = chunk.reshape([4, 2, 8, CHUNK // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return gl.convert_layout(parts.reshape([16 * CHUNK, 4]), ORDER, assert_trivial=True)


@gluon.jit
def _from_memory_order(parts, CHUNK: gl.constexpr):
    return parts.reshape([CHUNK // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, CHUNK])


@gluon.jit
def _finish(
    y, out_ptr, first_row, first_column, M, N, out_stride,
    GATED: gl.constexpr, RESIDUAL: gl.constexpr, LOG2_E: gl.constexpr,
):  # fmt: skip
    """What follows the product, y [64 lines, rows of x]: gate, sum with what is there, store."""
    CHUNK: gl.constexpr = y.shape[1]
    COLUMNS: gl.constexpr = 32 if GATED else 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    rows = first_row + gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    at = out_ptr + rows.to(gl.int64)[:, None] * out_stride + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if GATED:
        gate, up = y.reshape([4, 2, 8, CHUNK]).permute([0, 2, 3, 1]).split()
        grown = 1.0 + gl.exp2(gate * -LOG2_E)
        # Good to a bit of float32, where a division costs several instructions.
        sigmoid = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], dtype=gl.float32, is_pure=True, pack=1
        )
        y = (gate * up * sigmoid).reshape([COLUMNS, CHUNK])
    if RESIDUAL:
        old = gl.load(at, inside, 0.0)
        y += gl.convert_layout(old.permute([1, 0]), y.type.layout).to(gl.float32)
    gl.store(at, gl.convert_layout(y.to(out_ptr.dtype.element_ty).permute([1, 0]), LAYOUT), inside)


@gluon.jit
def _consume(
    out_ptr, partial_ptr, counter_ptr, x_tiles, rest_tiles, weight_tiles, full, empty, M, N, out_stride, steps, tiles_m,
    total, NUMBER: gl.constexpr, CONSUMERS: gl.constexpr, REST: gl.constexpr, MOST: gl.constexpr,
    GATED: gl.constexpr, RESIDUAL: gl.constexpr, CHUNK: gl.constexpr, LOG2_E: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    LINES: gl.constexpr = weight_tiles.shape[1]
    COLUMNS: gl.constexpr = LINES // 2 if GATED else LINES
    CHUNKS: gl.constexpr = (ROWS + REST) // CHUNK
    CHUNK_SIZE: gl.constexpr = LINES * CHUNK
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    REST_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST if REST > 0 else 8, 16])
    ORDER: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    line = gl.arange(0, CHUNK_SIZE // 4, gl.SliceLayout(1, ORDER))
    places = line[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, ORDER))[None, :]
    AT_ONCE: gl.constexpr = 2 if REST > 0 else 1  # matrix products of a step
    if PDL:
        _asm("griddepcontrol.wait; // $0")
    block = gl.program_id(0)
    begin, end = _share(block, total)
    stage = 0
    parity = 0
    step = begin
    while step < end:
        tile = step // steps
        count = gl.minimum(steps - step % steps, end - step)
        acc = gl.zeros([LINES, ROWS], gl.float32, LAYOUT)
        mbarrier.wait(full.index(stage), parity)
        weight = weight_tiles.index(stage * CONSUMERS + NUMBER)
        mixed = warpgroup_mma(weight, x_tiles.index(stage).permute([1, 0]), acc, use_acc=False, is_async=True)
        if REST > 0:
            rest = gl.zeros([LINES, REST], gl.float32, REST_LAYOUT)
            blend = warpgroup_mma(weight, rest_tiles.index(stage).permute([1, 0]), rest, use_acc=False, is_async=True)
            acc, rest = warpgroup_mma_wait(AT_ONCE, deps=[mixed, blend])
        else:
            acc = warpgroup_mma_wait(AT_ONCE, deps=[mixed])
        before = stage
        for _ in range(1, count):
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
            mbarrier.wait(full.index(stage), parity)
            weight = weight_tiles.index(stage * CONSUMERS + NUMBER)
            mixed = warpgroup_mma(weight, x_tiles.index(stage).permute([1, 0]), acc, is_async=True)
            if REST > 0:
                blend = warpgroup_mma(weight, rest_tiles.index(stage).permute([1, 0]), rest, is_async=True)
                acc, rest = warpgroup_mma_wait(AT_ONCE, deps=[mixed, blend])
            else:
                acc = warpgroup_mma_wait(AT_ONCE, deps=[mixed])
            mbarrier.arrive(empty.index(before), count=1)
            before = stage
        if REST > 0:
            acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
            chunks = _chunks(acc, CHUNK) + _chunks(rest, CHUNK)
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
            chunks = _chunks(acc, CHUNK)
        mbarrier.arrive(empty.index(before), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1

        if count == steps:
            row = tile % tiles_m * (ROWS + REST)
            column = (tile // tiles_m * CONSUMERS + NUMBER) * COLUMNS
            for i in gl.static_range(CHUNKS):
                _finish(chunks[i], out_ptr, row + i * CHUNK, column, M, N, out_stride, GATED, RESIDUAL, LOG2_E)
        else:
            slot = (block * 2 + gl.where(step == begin, 0, 1)) * CONSUMERS + NUMBER
            mine = partial_ptr + slot * (CHUNKS * CHUNK_SIZE)
            for i in gl.static_range(CHUNKS):
                gl.store(mine + i * CHUNK_SIZE + places, _to_memory_order(chunks[i], ORDER))
            gl.thread_barrier()  # every thread's part is written before one of them says so
            gl.atomic_add(counter_ptr + tile * CONSUMERS + NUMBER, 1, sem="release")
        step += count

    for turn in range(2):
        tile = gl.where(turn == 0, begin // steps, (end - 1) // steps)
        first = _block_of(tile * steps, total)
        last = _block_of(tile * steps + steps - 1, total)
        again = (turn == 1) & (tile == begin // steps)
        if (last > first) & (again == 0):
            sharers = last - first + 1
            counter = counter_ptr + tile * CONSUMERS + NUMBER
            _wait_until(counter, sharers)
            row = tile % tiles_m * (ROWS + REST)
            column = (tile // tiles_m * CONSUMERS + NUMBER) * COLUMNS
            for i in range(block - first, CHUNKS, sharers):
                y = gl.zeros([CHUNK_SIZE // 4, 4], gl.float32, ORDER)
                for other in gl.static_range(MOST):
                    its_begin, its_end = _share(first + other, total)
                    slot = ((first + other) * 2 + gl.where(its_begin // steps == tile, 0, 1)) * CONSUMERS + NUMBER
                    place = partial_ptr + (slot * CHUNKS + i) * CHUNK_SIZE + places
                    # Not through the L1 cache: other processors wrote this a moment ago.
                    y += gl.load(place, first + other <= last, 0.0, cache_modifier=".cg")
                _finish(
                    _from_memory_order(y, CHUNK), out_ptr, row + i * CHUNK, column, M, N, out_stride,
                    GATED, RESIDUAL, LOG2_E,
                )  # fmt: skip
            gl.thread_barrier()
            if gl.atomic_add(counter, 1, sem="relaxed") == 2 * sharers - 1:  # nobody waits for it any more
                gl.store(counter, 0)


@gluon.jit(do_not_specialize=["M", "K", "tiles_m"])
def _linear_sm90_kernel(
    x_desc, rest_desc, weight_desc, out_ptr, partial_ptr, counter_ptr, M, N, K, tiles_m, out_stride,
    CONSUMERS: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr, MOST: gl.constexpr, GATED: gl.constexpr,
    RESIDUAL: gl.constexpr, LINES: gl.constexpr, CHUNK: gl.constexpr, LOG2_E: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    dtype: gl.constexpr = x_desc.dtype
    COUNTER: gl.constexpr = mbarrier.MBarrierLayout()
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    OUTPUTS: gl.constexpr = CONSUMERS * (LINES // 2 if GATED else LINES)
    steps = (K + BLOCK_K - 1) // BLOCK_K
    total = (N + OUTPUTS - 1) // OUTPUTS * tiles_m * steps
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], SWIZZLED)
    rest_tiles = x_tiles
    if REST > 0:
        rest_tiles = gl.allocate_shared_memory(dtype, [STAGES, REST, BLOCK_K], SWIZZLED)
    weight_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, LINES, BLOCK_K], SWIZZLED)
    arriving = weight_tiles
    if GATED:  # a swizzled tile's lines lie one after the other: so do groups of 8
        arriving = weight_tiles._reinterpret(
            dtype, [STAGES * CONSUMERS, LINES // 16, 2, 8, BLOCK_K], weight_desc.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    if PDL:
        _asm("griddepcontrol.launch_dependents; // $0")
    N0: gl.constexpr = 0
    N1: gl.constexpr = 1
    N2: gl.constexpr = 2
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    out_ptr, partial_ptr, counter_ptr, x_tiles, rest_tiles, weight_tiles, full, empty, M, N, out_stride,
                    steps, tiles_m, total, N0, CONSUMERS, REST, MOST, GATED, RESIDUAL, CHUNK, LOG2_E, PDL,
                )),
                (_consume, (
                    out_ptr, partial_ptr, counter_ptr, x_tiles, rest_tiles, weight_tiles, full, empty, M, N, out_stride,
                    steps, tiles_m, total, N1, CONSUMERS, REST, MOST, GATED, RESIDUAL, CHUNK, LOG2_E, PDL,
                )),
                (_produce, (
                    x_desc, rest_desc, weight_desc, x_tiles, rest_tiles, arriving, full, empty, steps, tiles_m, total,
                    GATED, CONSUMERS, REST, PDL,
                )),
            ],
            [4, 1],  # warps of all but the first
            [232, 40],  # their registers; the first consumer gets the rest, 232
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    out_ptr, partial_ptr, counter_ptr, x_tiles, rest_tiles, weight_tiles, full, empty, M, N, out_stride,
                    steps, tiles_m, total, N0, CONSUMERS, REST, MOST, GATED, RESIDUAL, CHUNK, LOG2_E, PDL,
                )),
                (_consume, (
                    out_ptr, partial_ptr, counter_ptr, x_tiles, rest_tiles, weight_tiles, full, empty, M, N, out_stride,
                    steps, tiles_m, total, N1, CONSUMERS, REST, MOST, GATED, RESIDUAL, CHUNK, LOG2_E, PDL,
                )),
                (_consume, (
                    out_ptr, partial_ptr, counter_ptr, x_tiles, rest_tiles, weight_tiles, full, empty, M, N, out_stride,
                    steps, tiles_m, total, N2, CONSUMERS, REST, MOST, GATED, RESIDUAL, CHUNK, LOG2_E, PDL,
                )),
                (_produce, (
                    x_desc, rest_desc, weight_desc, x_tiles, rest_tiles, arriving, full, empty, steps, tiles_m, total,
                    GATED, CONSUMERS, REST, PDL,
                )),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip


@cache
def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for shares of tiles and the tiles' counters, for all products: one stream runs them, one after another."""
    return (
        torch.empty(2 * MAX_BLOCKS * 3 * LINES * 256, device=device),
        torch.zeros(3 * MAX_TILES, dtype=torch.int32, device=device),
    )


def sharers(tiles: int, steps: int, blocks: int) -> int:
    """The most blocks that share one tile."""
    total = tiles * steps

    def block_of(step: int) -> int:
        return ((step + 1) * blocks - 1) // total

    most = max(block_of(t * steps + steps - 1) - block_of(t * steps) + 1 for t in range(tiles))
    return most if most <= 4 else most + most % 2  # fewer kernels


def linear(
    x: torch.Tensor, weight: torch.Tensor, gated: bool, residual: torch.Tensor | None, out: torch.Tensor | None,
    config: Config,
) -> torch.Tensor:
    m, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    swizzled = gl.NVMMASharedLayout(128, 16, 2)
    if gated:
        apart = weight.stride(0)
        weight_desc = TensorDescriptor(
            weight, [n // 8, 2, 8, k], [8 * apart, n * apart, apart, 1], [LINES // 16, 2, 8, BLOCK_K],
            gl.NVMMASharedLayout(128, 16, 4),
        )  # fmt: skip
    else:
        weight_desc = TensorDescriptor.from_tensor(weight, [LINES, BLOCK_K], swizzled)
    x_desc = TensorDescriptor.from_tensor(x, [config.rows, BLOCK_K], swizzled)
    rest_desc = TensorDescriptor.from_tensor(x, [config.rest, BLOCK_K], swizzled) if config.rest else x_desc
    partial, counters = _workspace(x.device)
    tiles_m = -(-m // (config.rows + config.rest))
    tiles = tiles_m * -(-n // (config.consumers * (LINES // 2 if gated else LINES)))
    steps = -(-k // BLOCK_K)
    blocks = min(config.blocks, num_processors(x.device), tiles * steps)
    pdl = has_pdl(x.device)
    _linear_sm90_kernel[(blocks,)](
        x_desc, rest_desc, weight_desc, out, partial, counters, m, n, k, tiles_m, out.stride(0),
        CONSUMERS=config.consumers, REST=config.rest, STAGES=config.stages, MOST=sharers(tiles, steps, blocks),
        GATED=gated, RESIDUAL=residual is not None, LINES=LINES, CHUNK=CHUNK, LOG2_E=LOG2_E, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
