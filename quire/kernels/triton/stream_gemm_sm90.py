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
def _share(steps, tiles, SPLIT: gl.constexpr):
    """The steps, of those of all tiles one after another, that this block has: from, to."""
    block = gl.program_id(0)
    if SPLIT == 1:
        blocks = gl.num_programs(0)
        return block * (tiles * steps) // blocks, (block + 1) * (tiles * steps) // blocks
    else:
        first = block // SPLIT * steps
        share = block % SPLIT
        return first + share * steps // SPLIT, first + (share + 1) * steps // SPLIT


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
def _ask_for(weight_ptr, weight_stride, tile, k, K, N, COLUMNS: gl.constexpr, GATED: gl.constexpr):
    """Has the L2 cache fetch COLUMNS of a tile's 128 lines, those from k that there are."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i = gl.arange(0, 128, LAYOUT)
    if GATED:
        line = gl.minimum(tile * 64 + i % 64, N - 1) + gl.where(i < 64, 0, N)
    else:
        line = gl.minimum(tile * 128 + i, N - 1)
    at = weight_ptr + line.to(gl.int64) * weight_stride + k
    num_bytes = gl.zeros([128], gl.int32, LAYOUT) + gl.minimum(K - k, COLUMNS) // 8 * 16
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [at.to(gl.uint64, bitcast=True), num_bytes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _produce(
    x_desc, rest_desc, weight_desc, weight_ptr, weight_stride, x_tiles, rest_tiles, weight_tiles, full, empty, K, N,
    steps, tiles, tiles_m, SPLIT: gl.constexpr, GATED: gl.constexpr, CONSUMERS: gl.constexpr, REST: gl.constexpr,
    LINES: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    BLOCK_K: gl.constexpr = x_tiles.shape[2]
    BYTES: gl.constexpr = (ROWS + REST + CONSUMERS * LINES) * BLOCK_K * 2
    begin, end = _share(steps, tiles, SPLIT)
    first = gl.maximum(begin, (end - 1) // steps * steps)
    early = gl.minimum(end - first, STAGES)
    for i in gl.static_range(STAGES):
        if i < early:
            mbarrier.expect(full.index(i), BYTES)
            _bring_weight(
                weight_desc, weight_tiles, full.index(i), i, first // steps // tiles_m, (first % steps + i) * BLOCK_K,
                GATED, CONSUMERS, LINES,
            )  # fmt: skip
    if AHEAD > 0:
        if first % steps + STAGES < steps:
            _ask_for(
                weight_ptr, weight_stride, first // steps // tiles_m, (first % steps + STAGES) * BLOCK_K, K, N,
                AHEAD * BLOCK_K, GATED,
            )  # fmt: skip
    if PDL:
        _asm("griddepcontrol.wait; // $0")
    stage = 0
    parity = 1
    while end > begin:
        first = gl.maximum(begin, (end - 1) // steps * steps)
        tile = first // steps
        row = tile % tiles_m * (ROWS + REST)
        for step in range(first % steps, first % steps + end - first):
            ready = full.index(stage)
            if early == 0:
                mbarrier.wait(empty.index(stage), parity)
                mbarrier.expect(ready, BYTES)
                _bring_weight(
                    weight_desc, weight_tiles, ready, stage, tile // tiles_m, step * BLOCK_K, GATED, CONSUMERS, LINES
                )
            else:
                early -= 1
            if AHEAD > 0:
                if (step - first % steps) % AHEAD == 0:
                    k = (step + STAGES + AHEAD) * BLOCK_K
                    if (k < K) & (step + STAGES + AHEAD < first % steps + end - first):
                        _ask_for(weight_ptr, weight_stride, tile // tiles_m, k, K, N, AHEAD * BLOCK_K, GATED)
            tma.async_copy_global_to_shared(x_desc, [row, step * BLOCK_K], ready, x_tiles.index(stage))
            if REST > 0:
                tma.async_copy_global_to_shared(
                    rest_desc, [row + ROWS, step * BLOCK_K], ready, rest_tiles.index(stage)
                )
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
        end = first


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
def _places(
    out_ptr, first_row, first_column, M, N, out_stride, CHUNK: gl.constexpr, COLUMNS: gl.constexpr
):
    """Where a chunk of the result belongs, and what of it exists."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    rows = first_row + gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    at = out_ptr + rows.to(gl.int64)[:, None] * out_stride + columns[None, :]
    return at, (rows < M)[:, None] & (columns < N)[None, :]


@gluon.jit
def _finish(y, old, at, inside, GATED: gl.constexpr, RESIDUAL: gl.constexpr, LOG2_E: gl.constexpr):
    """What follows the product, y [64 lines, rows of x]: gate, sum with what was there, store."""
    CHUNK: gl.constexpr = y.shape[1]
    if GATED:
        gate, up = y.reshape([4, 2, 8, CHUNK]).permute([0, 2, 3, 1]).split()
        grown = 1.0 + gl.exp2(gate * -LOG2_E)
        # Good to a bit of float32, where a division costs several instructions.
        sigmoid = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], dtype=gl.float32, is_pure=True, pack=1
        )
        y = (gate * up * sigmoid).reshape([32, CHUNK])
    if RESIDUAL:
        y += gl.convert_layout(old.permute([1, 0]), y.type.layout).to(gl.float32)
    gl.store(at, gl.convert_layout(y.to(at.dtype.element_ty).permute([1, 0]), at.type.layout), inside)


@gluon.jit
def _consume(
    out_ptr, partial_ptr, counter_ptr, x_tiles, rest_tiles, weight_tiles, full, empty, M, N, out_stride, steps, tiles,
    tiles_m, NUMBER: gl.constexpr, CONSUMERS: gl.constexpr, REST: gl.constexpr, SPLIT: gl.constexpr,
    GATED: gl.constexpr, RESIDUAL: gl.constexpr, CHUNK: gl.constexpr, LOG2_E: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    LINES: gl.constexpr = weight_tiles.shape[1]
    COLUMNS: gl.constexpr = LINES // 2 if GATED else LINES
    CHUNKS: gl.constexpr = (ROWS + REST) // CHUNK
    SIZE: gl.constexpr = LINES * CHUNK
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    REST_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST if REST > 0 else 8, 16])
    ORDER: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    line = gl.arange(0, SIZE // 4, gl.SliceLayout(1, ORDER))
    order = line[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, ORDER))[None, :]
    AT_ONCE: gl.constexpr = 2 if REST > 0 else 1  # matrix products of a step
    if PDL:
        _asm("griddepcontrol.wait; // $0")
    block = gl.program_id(0)
    begin, end = _share(steps, tiles, SPLIT)
    share = block % SPLIT
    MINE: gl.constexpr = (CHUNKS + SPLIT - 1) // SPLIT  # chunks that are this block's to add up
    olds = ()
    if SPLIT > 1:
        tile = begin // steps
        row = tile % tiles_m * (ROWS + REST)
        column = (tile // tiles_m * CONSUMERS + NUMBER) * COLUMNS
        limit = gl.minimum(M, row + ROWS + REST)
        if RESIDUAL:
            for i in gl.static_range(MINE):
                at, inside = _places(
                    out_ptr, row + (share + i * SPLIT) * CHUNK, column, limit, N, out_stride, CHUNK, COLUMNS
                )
                olds += (gl.load(at, inside, 0.0),)
    stage = 0
    parity = 0
    while end > begin:
        first = gl.maximum(begin, (end - 1) // steps * steps)
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
        for _ in range(first + 1, end):
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

        if SPLIT > 1:
            counter = counter_ptr + tile * CONSUMERS + NUMBER
            parts = partial_ptr + (tile * CONSUMERS + NUMBER) * (SPLIT * CHUNKS * SIZE) + order
            for i in gl.static_range(CHUNKS):
                gl.store(parts + (i * SPLIT + share) * SIZE, _to_memory_order(chunks[i], ORDER))
            gl.thread_barrier()  # every thread's part is written before one of them says so
            gl.atomic_add(counter, 1, sem="release")
            _wait_until(counter, SPLIT)
            pieces = ()
            for i in gl.static_range(MINE):
                for j in gl.static_range(SPLIT):
                    # Not through the L1 cache: other processors wrote this a moment ago.
                    pieces += (gl.load(
                        parts + ((share + i * SPLIT) * SPLIT + j) * SIZE, share + i * SPLIT < CHUNKS, 0.0,
                        cache_modifier=".cg",
                    ),)  # fmt: skip
            for i in gl.static_range(MINE):
                y = pieces[i * SPLIT]
                for j in gl.static_range(1, SPLIT):
                    y += pieces[i * SPLIT + j]
                at, inside = _places(
                    out_ptr, row + (share + i * SPLIT) * CHUNK, column, limit, N, out_stride, CHUNK, COLUMNS
                )
                if RESIDUAL:
                    _finish(_from_memory_order(y, CHUNK), olds[i], at, inside, GATED, RESIDUAL, LOG2_E)
                else:
                    _finish(_from_memory_order(y, CHUNK), y, at, inside, GATED, RESIDUAL, LOG2_E)
            gl.thread_barrier()
            if gl.atomic_add(counter, 1, sem="relaxed") == 2 * SPLIT - 1:  # nobody waits for it any more
                gl.store(counter, 0)
        else:
            tile = first // steps
            if end % steps != 0:  # the block before this one in order of K has the rest: it ends with it
                mine = partial_ptr + (block * CONSUMERS + NUMBER) * (CHUNKS * SIZE) + order
                for i in gl.static_range(CHUNKS):
                    gl.store(mine + i * SIZE, _to_memory_order(chunks[i], ORDER))
                gl.thread_barrier()
                gl.atomic_add(counter_ptr + block * CONSUMERS + NUMBER, 1, sem="release")
            else:
                row = tile % tiles_m * (ROWS + REST)
                column = (tile // tiles_m * CONSUMERS + NUMBER) * COLUMNS
                other = (block - 1) * CONSUMERS + NUMBER
                shared = end - first < steps
                if shared:
                    _wait_until(counter_ptr + other, 1)
                pieces = ()
                for i in gl.static_range(CHUNKS):
                    pieces += (gl.load(
                        partial_ptr + (other * CHUNKS + i) * SIZE + order, shared, 0.0, cache_modifier=".cg"
                    ),)  # fmt: skip
                for i in gl.static_range(CHUNKS):
                    at, inside = _places(
                        out_ptr, row + i * CHUNK, column, M, N, out_stride, CHUNK, COLUMNS
                    )
                    y = _from_memory_order(_to_memory_order(chunks[i], ORDER) + pieces[i], CHUNK)
                    if RESIDUAL:
                        _finish(y, gl.load(at, inside, 0.0), at, inside, GATED, RESIDUAL, LOG2_E)
                    else:
                        _finish(y, y, at, inside, GATED, RESIDUAL, LOG2_E)
                if shared:
                    gl.store(counter_ptr + other, 0)
        end = first


@gluon.jit(do_not_specialize=["M", "K", "tiles_m"])
def _linear_sm90_kernel(
    x_desc, rest_desc, weight_desc, weight_ptr, out_ptr, partial_ptr, counter_ptr, M, N, K, tiles_m, weight_stride,
    out_stride, AHEAD: gl.constexpr, CONSUMERS: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, GATED: gl.constexpr,
    RESIDUAL: gl.constexpr, LINES: gl.constexpr, CHUNK: gl.constexpr, LOG2_E: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    dtype: gl.constexpr = x_desc.dtype
    COUNTER: gl.constexpr = mbarrier.MBarrierLayout()
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    OUTPUTS: gl.constexpr = CONSUMERS * (LINES // 2 if GATED else LINES)
    steps = (K + BLOCK_K - 1) // BLOCK_K
    tiles = (N + OUTPUTS - 1) // OUTPUTS * tiles_m
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
    gl.warp_specialize(
        [
            (_consume, (
                out_ptr, partial_ptr, counter_ptr, x_tiles, rest_tiles, weight_tiles, full, empty, M, N, out_stride,
                steps, tiles, tiles_m, N0, CONSUMERS, REST, SPLIT, GATED, RESIDUAL, CHUNK, LOG2_E, PDL,
            )),
            (_consume, (
                out_ptr, partial_ptr, counter_ptr, x_tiles, rest_tiles, weight_tiles, full, empty, M, N, out_stride,
                steps, tiles, tiles_m, N1, CONSUMERS, REST, SPLIT, GATED, RESIDUAL, CHUNK, LOG2_E, PDL,
            )),
            (_produce, (
                x_desc, rest_desc, weight_desc, weight_ptr, weight_stride, x_tiles, rest_tiles, arriving, full, empty,
                K, N, steps, tiles, tiles_m, SPLIT, GATED, CONSUMERS, REST, LINES, AHEAD, PDL,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [232, 40],  # their registers; the first consumer gets the rest, 232
    )  # fmt: skip


@cache
def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for shares of tiles and their counters, for all products: one stream runs them, one after another."""
    return (
        torch.empty(MAX_BLOCKS * 2 * LINES * 256, device=device),
        torch.zeros(MAX_BLOCKS * 2, dtype=torch.int32, device=device),
    )


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
    tiles = tiles_m * -(-n // (2 * (LINES // 2 if gated else LINES)))
    processors = min(num_processors(x.device), MAX_BLOCKS)
    blocks = tiles * config.split if config.split > 1 else min(config.blocks, tiles, processors)
    assert blocks <= processors
    pdl = has_pdl(x.device)
    _linear_sm90_kernel[(blocks,)](
        x_desc, rest_desc, weight_desc, weight, out, partial, counters, m, n, k, tiles_m, weight.stride(0),
        out.stride(0), AHEAD=config.ahead,
        CONSUMERS=2, REST=config.rest, STAGES=config.stages, SPLIT=config.split,
        GATED=gated, RESIDUAL=residual is not None, LINES=LINES, CHUNK=config.chunk, LOG2_E=LOG2_E, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
