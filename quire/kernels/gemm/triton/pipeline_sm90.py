"""What the products of many rows share, for compute capability 9.0, in Gluon: all but the end of a tile.

A block of threads stays on its processor and works through tiles of x [m, k] @ weight.T, BLOCK_M lines of x by
BLOCK_N of the weight. Its warps have roles. The producer, one warp, keeps the bulk copy engine busy: x and the weight
come in steps of BLOCK_K through a ring of STAGES in shared memory, each as two halves, and the weight's two need not be
neighbours. The two consumers, four warps each, have half of the lines of x each and all of the weight's, so one matrix
instruction takes both halves of the weight together. What becomes of the sums is the kernel's own affair.
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

from quire.kernels.triton.descriptors import described
from quire.kernels.triton.launch import num_processors

BLOCK_M, BLOCK_N, BLOCK_K, STAGES = 128, 256, 64, 4
# Tiles are taken in columns of so many: what runs at once then reads about as many lines of x as of the weight.
GROUP_M = 12
SWIZZLED, INTERLEAVED = (gl.NVMMASharedLayout(128, 16, rank) for rank in (2, 5))
OPTIONS = {  # of every kernel
    "STAGES": STAGES, "GROUP_M": GROUP_M, "CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40,
    "num_warps": 4,
}  # fmt: skip


@gluon.jit
def _asm(TEXT: gl.constexpr):
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def follow(PDL: gl.constexpr):
    """For all warps, for it stands before they part: from here on what kernels before this one wrote may be read."""
    if PDL:
        _asm("griddepcontrol.wait; // $0")
        _asm("griddepcontrol.launch_dependents; // $0")


@gluon.jit
def place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Row and column of a tile among tiles_m by tiles_n."""
    group = tile // (GROUP_M * tiles_n)
    inside = tile % (GROUP_M * tiles_n)
    size = gl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + inside % size, inside // size


@gluon.jit
def allocate(x_desc, HALF_N: gl.constexpr, STAGES: gl.constexpr):
    """The ring, x and the weight by halves, stage after stage; and counters of what is full and what is empty."""
    HALF_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    COUNTER: gl.constexpr = mbarrier.MBarrierLayout()
    x_halves = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, HALF_M, BLOCK_K], x_desc.layout)
    weight_halves = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, HALF_N, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], COUNTER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return x_halves, weight_halves, full, empty


@gluon.jit
def fetch(
    x_desc, weight_desc, x_halves, weight_halves, full, empty, row, line, apart, stage, parity, steps,
):  # fmt: skip
    """Keep the ring full with a tile's operands: lines of x from `row` on; of the weight those from `line` on, and as
    many from `apart` after that. Returns where in the ring the next tile's begin.

    A `weight_desc` of more than two dimensions is one of `interleaved`.
    """
    INTERLEAVED: gl.constexpr = len(weight_desc.block_type.shape) > 2
    STAGES: gl.constexpr = full.shape[0]
    HALF_M: gl.constexpr = x_halves.shape[1]
    BLOCK_K: gl.constexpr = x_halves.shape[2]
    HALF_N: gl.constexpr = weight_halves.shape[1]
    for step in range(steps):
        k = step * BLOCK_K
        mbarrier.wait(empty.index(stage), parity)
        ready = full.index(stage)
        mbarrier.expect(ready, 2 * (HALF_M + HALF_N) * BLOCK_K * 2)
        for i in gl.static_range(2):
            first = line + i * apart
            half = weight_halves.index(2 * stage + i)
            if INTERLEAVED:
                half = half._reinterpret(weight_desc.dtype, weight_desc.block_type.shape, weight_desc.layout)
                tma.async_copy_global_to_shared(weight_desc, [first // 32, 0, 0, 0, k], ready, half)
            else:
                tma.async_copy_global_to_shared(weight_desc, [first, k], ready, half)
        tma.async_copy_global_to_shared(x_desc, [row, k], ready, x_halves.index(2 * stage))
        tma.async_copy_global_to_shared(x_desc, [row + HALF_M, k], ready, x_halves.index(2 * stage + 1))
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1
    return stage, parity


@gluon.jit
def produce(
    x_desc, weight_desc, x_halves, weight_halves, full, empty, stride, apart, steps, tiles_m, tiles_n,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """Tile n takes lines n * stride … of the weight, and as many that begin `apart` lines after these."""
    HALF_M: gl.constexpr = x_halves.shape[1]
    stage = 0
    parity = 1
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = place(tile, tiles_m, tiles_n, GROUP_M)
        stage, parity = fetch(
            x_desc, weight_desc, x_halves, weight_halves, full, empty, m * (2 * HALF_M), n * stride, apart, stage,
            parity, steps,
        )  # fmt: skip


@gluon.jit
def multiply(x_halves, weight_halves, full, empty, stage, parity, steps, NUMBER: gl.constexpr):
    """A tile's sums, float32 [half of BLOCK_M, BLOCK_N], of consumer NUMBER, the last product still under way: `finish`
    waits for it. And where in the ring that one's operands are.

    A thread has columns c + 8 i for all i: of the tile's halves, quarters … those that correspond.
    """
    STAGES: gl.constexpr = full.shape[0]
    HALF_M: gl.constexpr = x_halves.shape[1]
    BLOCK_K: gl.constexpr = x_halves.shape[2]
    BLOCK_N: gl.constexpr = 2 * weight_halves.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    weight_tiles = weight_halves._reinterpret(weight_halves.dtype, [STAGES, BLOCK_N, BLOCK_K], weight_halves.layout)
    before = stage
    sums = gl.zeros([HALF_M, BLOCK_N], gl.float32, LAYOUT)
    mbarrier.wait(full.index(stage), parity)
    mixed = warpgroup_mma(
        x_halves.index(2 * stage + NUMBER), weight_tiles.index(stage).permute([1, 0]), sums, use_acc=False,
        is_async=True,
    )  # fmt: skip
    sums = warpgroup_mma_wait(1, deps=[mixed])
    for _ in range(1, steps):
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1
        mbarrier.wait(full.index(stage), parity)
        mixed = warpgroup_mma(
            x_halves.index(2 * stage + NUMBER), weight_tiles.index(stage).permute([1, 0]), sums, is_async=True
        )  # fmt: skip
        sums = warpgroup_mma_wait(1, deps=[mixed])
        mbarrier.arrive(empty.index(before), count=1)
        before = stage  # a new value in every turn: with the one it has ahead of the loop, it would stay that
    return sums, stage, parity


@gluon.jit
def finish(sums, full, empty, stage, parity):
    """The sums, and where the next tile begins."""
    # What this waits for has happened. Its branch keeps the assembler from moving the wait below ahead of what shall be
    # done during the last product.
    mbarrier.wait(full.index(stage), parity)
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index(stage), count=1)
    stage += 1
    if stage == full.shape[0]:
        stage = 0
        parity ^= 1
    return sums, stage, parity


@gluon.jit
def leave(full, empty, stage, parity, steps):
    """Make nothing of a tile's operands; returns where those of the next begin."""
    for _ in range(steps):
        mbarrier.wait(full.index(stage), parity)
        mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if stage == full.shape[0]:
            stage = 0
            parity ^= 1
    return stage, parity


@gluon.jit
def in_rows(sums):
    """The sums of a weight that was read `interleaved`, in the order of its lines: a thread has 8 columns in a row."""
    LINES: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    return sums.reshape([LINES, COLUMNS // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([LINES, COLUMNS])


@gluon.jit
def halves(x):
    """[lines, 2 n] → the first and the last n columns."""
    LINES: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] // 2
    return x.reshape([LINES, 2, HALF]).permute([0, 2, 1]).split()


@gluon.jit
def swish(gate, up, LOG2_E: gl.constexpr):
    """silu(gate) * up, float32."""
    grown = 1.0 + gl.exp2(gate * -LOG2_E)
    # Good to a bit of float32, where a division costs several instructions.
    sigmoid = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], dtype=gl.float32, is_pure=True, pack=1
    )
    return gate * up * sigmoid


@gluon.constexpr_function
def row_layout(lines, width):
    """Of [lines, width], width 32, 64 or 128 times any power of 2, as `in_rows` and `halves` leave it: a thread has 8
    columns in a row and four threads 32."""
    wide = [[0, 32 << i] for i in range((width // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *wide, [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[lines, width],
    )


@gluon.jit
def ask(out_desc, out_tile, loaded, first_m, first_n):
    """For what stands where a tile's results will go, to be added to them."""
    mbarrier.expect(loaded, out_tile.shape[0] * 128)
    tma.async_copy_global_to_shared(out_desc, [first_m, first_n], loaded, out_tile)


@gluon.jit
def hand_over(sums, out_desc, out_tile, loaded, parity, first_m, first_n, RESIDUAL: gl.constexpr):
    """Sums [64 lines of the weight, rows] to where they belong, added to what was asked for. Before the place
    `out_tile` [rows, 64] is used again it must be waited for."""
    across = out_tile.permute([1, 0])
    if RESIDUAL:
        mbarrier.wait(loaded, parity)
        sums += across.load(sums.type.layout).to(gl.float32)
    across.store(sums.to(out_tile.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [first_m, first_n], out_tile)


def plain(x: torch.Tensor, lines: int) -> TensorDescriptor:
    """Tells the copy engine of x [m, k], to be read `lines` and BLOCK_K columns at a time."""
    return described(TensorDescriptor, x, (lines, BLOCK_K), SWIZZLED)


def interleaved(weight: torch.Tensor) -> TensorDescriptor:
    """The same of weight [n, k], n a multiple of 32, for half a tile whose lines come in another order.

    A matrix instruction deals columns to four threads by twos, 8 j + 2 i + 0 and + 1 to thread i for all j. Here the
    line in such a place is 8 i + 2 j + 0 or + 1: thread i gets eight in a row.
    """
    n, k = weight.shape
    stride = weight.stride(0)
    shape, strides = [n // 32, 4, 4, 2, k], [32 * stride, 2 * stride, 8 * stride, stride, 1]
    return described(TensorDescriptor, weight, (BLOCK_N // 64, 4, 4, 2, BLOCK_K), INTERLEAVED, shape, strides)


def grid(m: int, n: int, device: torch.device) -> tuple[int]:
    return (min(-(-m // BLOCK_M) * -(-n // BLOCK_N), num_processors(device)),)


def busy(m: int, n: int, device: torch.device) -> float:
    """Of a product of m rows and n columns: the share of the matrix units' work that is none of a tile's edges and of
    the last round of tiles."""
    processors = num_processors(device)
    rounds = -(-(-(-m // BLOCK_M) * -(-n // BLOCK_N)) // processors)
    return m * n / (rounds * processors * BLOCK_M * BLOCK_N)
