"""silu(x @ gate.T) * (x @ up.T) for the rows of prompts, for compute capability 9.0, in Gluon.

A block of threads stays on its processor and works through tiles of the result, BLOCK_M rows by BLOCK_N columns. Its
warps have roles. The producer, one warp, keeps the bulk copy engine busy: x and the weight come in steps of BLOCK_K
through a ring of STAGES in shared memory, the weight as BLOCK_N lines of gate above as many of up. The two consumers,
four warps each, have half of the rows each. One matrix instruction takes gate and up together, so the sums that belong
together end up in the same thread, and their product leaves the processor instead of both.
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

BLOCK_M, BLOCK_N, BLOCK_K, STAGES = 128, 128, 64, 4
# Tiles are taken in columns of so many: what runs at once then reads about as many lines of x as of the weight.
GROUP_M = 12

_built: set[tuple[torch.device, torch.dtype]] = set()  # what the kernel was compiled for


@gluon.jit
def _asm(TEXT: gl.constexpr):
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    group = tile // (GROUP_M * tiles_n)
    inside = tile % (GROUP_M * tiles_n)
    size = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + inside % size, inside // size


@gluon.jit
def _produce(
    x_desc, weight_desc, x_tiles, weight_tiles, full, empty, N, steps, tiles_m, tiles_n, GROUP_M: gl.constexpr
):
    STAGES: gl.constexpr = full.shape[0]
    HALF_M: gl.constexpr = x_tiles.shape[1]
    BLOCK_K: gl.constexpr = x_tiles.shape[2]
    BLOCK_N: gl.constexpr = weight_tiles.shape[1]
    stage = 0
    parity = 1
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP_M)
        row = m * (2 * HALF_M)
        column = n * BLOCK_N
        for step in range(steps):
            k = step * BLOCK_K
            mbarrier.wait(empty.index(stage), parity)
            ready = full.index(stage)
            mbarrier.expect(ready, 2 * (HALF_M + BLOCK_N) * BLOCK_K * 2)
            tma.async_copy_global_to_shared(weight_desc, [column, k], ready, weight_tiles.index(2 * stage))
            tma.async_copy_global_to_shared(weight_desc, [N + column, k], ready, weight_tiles.index(2 * stage + 1))
            tma.async_copy_global_to_shared(x_desc, [row, k], ready, x_tiles.index(2 * stage))
            tma.async_copy_global_to_shared(x_desc, [row + HALF_M, k], ready, x_tiles.index(2 * stage + 1))
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1


@gluon.jit
def _consume(
    out_desc, x_tiles, weight_tiles, out_tiles, full, empty, steps, tiles_m, tiles_n,
    NUMBER: gl.constexpr, GROUP_M: gl.constexpr, LOG2_E: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    HALF_M: gl.constexpr = out_tiles.shape[1]
    BLOCK_N: gl.constexpr = out_tiles.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_tile = out_tiles.index(NUMBER)
    stage = 0
    parity = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        before = stage
        both = gl.zeros([HALF_M, 2 * BLOCK_N], gl.float32, LAYOUT)
        mbarrier.wait(full.index(stage), parity)
        mixed = warpgroup_mma(
            x_tiles.index(2 * stage + NUMBER), weight_tiles.index(stage).permute([1, 0]), both, use_acc=False,
            is_async=True,
        )  # fmt: skip
        both = warpgroup_mma_wait(1, deps=[mixed])
        for _ in range(1, steps):
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
            mbarrier.wait(full.index(stage), parity)
            mixed = warpgroup_mma(
                x_tiles.index(2 * stage + NUMBER), weight_tiles.index(stage).permute([1, 0]), both, is_async=True
            )  # fmt: skip
            both = warpgroup_mma_wait(1, deps=[mixed])
            mbarrier.arrive(empty.index(before), count=1)
            before = stage  # a new value in every turn: with the one it has ahead of the loop, it would stay that
        both = warpgroup_mma_wait(0, deps=[both])
        mbarrier.arrive(empty.index(before), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1

        gate, up = both.reshape([HALF_M, 2, BLOCK_N]).permute([0, 2, 1]).split()
        grown = 1.0 + gl.exp2(gate * -LOG2_E)
        # Good to a bit of float32, where a division costs several instructions.
        sigmoid = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], dtype=gl.float32, is_pure=True, pack=1
        )
        tma.store_wait(0)
        gl.thread_barrier()  # the tile before this one has left its place
        out_tile.store(gl.convert_layout((gate * up * sigmoid).to(out_tiles.dtype), OUT_LAYOUT))
        fence_async_shared()
        gl.thread_barrier()
        m, n = _place(tile, tiles_m, tiles_n, GROUP_M)
        tma.async_copy_shared_to_global(out_desc, [(2 * m + NUMBER) * HALF_M, n * BLOCK_N], out_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def _gated_sm90_kernel(
    x_desc, weight_desc, out_desc, M, N, K,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, LOG2_E: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    HALF_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = weight_desc.block_type.shape[0]
    dtype: gl.constexpr = x_desc.dtype
    COUNTER: gl.constexpr = mbarrier.MBarrierLayout()
    tiles_m = (M + 2 * HALF_M - 1) // (2 * HALF_M)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    steps = (K + BLOCK_K - 1) // BLOCK_K
    x_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, HALF_M, BLOCK_K], x_desc.layout)
    halves = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK_N, BLOCK_K], weight_desc.layout)
    weight_tiles = halves._reinterpret(dtype, [STAGES, 2 * BLOCK_N, BLOCK_K], weight_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, HALF_M, BLOCK_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    if PDL:  # for all warps: the others start after this
        _asm("griddepcontrol.wait; // $0")
        _asm("griddepcontrol.launch_dependents; // $0")
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, x_tiles, weight_tiles, out_tiles, full, empty, steps, tiles_m, tiles_n,
                FIRST, GROUP_M, LOG2_E,
            )),
            (_consume, (
                out_desc, x_tiles, weight_tiles, out_tiles, full, empty, steps, tiles_m, tiles_n,
                SECOND, GROUP_M, LOG2_E,
            )),
            (_produce, (x_desc, weight_desc, x_tiles, halves, full, empty, N, steps, tiles_m, tiles_n, GROUP_M)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [232, 40],  # their registers; the first consumer gets the rest, 232
    )  # fmt: skip


def _launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, compile_only: bool = False) -> None:
    (m, k), n = x.shape, weight.shape[0] // 2
    swizzled = gl.NVMMASharedLayout(128, 16, 2)
    arguments = (
        TensorDescriptor.from_tensor(x, [BLOCK_M // 2, BLOCK_K], swizzled),
        TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K], swizzled),
        TensorDescriptor.from_tensor(out, [BLOCK_M // 2, BLOCK_N], swizzled),
        m, n, k,
    )  # fmt: skip
    pdl = has_pdl(x.device)
    options = {
        "STAGES": STAGES, "GROUP_M": GROUP_M, "LOG2_E": LOG2_E, "PDL": pdl, "num_warps": 4, "launch_pdl": pdl,
    }  # fmt: skip
    grid = (min(-(-m // BLOCK_M) * -(-n // BLOCK_N), num_processors(x.device)),)
    if compile_only:
        _gated_sm90_kernel.warmup(*arguments, grid=grid, **options)
    else:
        _gated_sm90_kernel[grid](*arguments, **options)


def compile_once(x: torch.Tensor, weight: torch.Tensor) -> None:
    """All that any number of rows of x's dtype will need: nothing is compiled in mid-service."""
    if (x.device, x.dtype) not in _built:
        _launch(x, weight, x.new_empty(len(x), len(weight) // 2), compile_only=True)
        _built.add((x.device, x.dtype))


def busy(m: int, n: int, device: torch.device) -> float:
    """Share of the matrix units' work that is none of a tile's edges and of the last round of tiles."""
    processors = num_processors(device)
    rounds = -(-(-(-m // BLOCK_M) * -(-n // BLOCK_N)) // processors)
    return m * n / (rounds * processors * BLOCK_M * BLOCK_N)


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [m, k], weight [2n, k] = [gate | up] → [m, n]; n, k and what rows are apart are multiples of 8."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight, out)
    return out
