"""x @ weight.T as in `code_tiles_sm90`, for large products: gate and up, and others with hundreds of rows.

Tiles are twice as tall, so that x is read half as often, and what is on its way is in shared memory, not in registers.
The producer keeps the bulk copy engine busy with blocks of 128 columns of x and of 256 lines of the weight's words. A
consumer, four warps, has 128 of the lines, as two times 64, and so takes four steps of 64 lines and 64 columns a block:
while the matrix units are at one it makes the next one's operands, and from a block to the next the other consumer
keeps them busy. Scales go into operands, which are rounded once, so sums stay where they are from a tile's first block
to its last one.
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

from quire.kernels.gemm.codes import BLOCK, HALF, Codes
from quire.kernels.gemm.triton.batch_gemm import MAX_TILES, _counters
from quire.kernels.gemm.triton.code_tiles_sm90 import MOST_ROWS, store_outputs
from quire.kernels.gemm.triton.code_words import factors, scaled_operands, shift, word_halves, word_layout
from quire.kernels.gemm.triton.codes import KINDS, arguments
from quire.kernels.gemm.triton.pipeline_sm90 import SWIZZLED, _asm
from quire.kernels.triton.launch import has_pdl, num_processors

LINES = 256  # of the weight, a tile
MANY = 20  # blocks a processor, from which on the larger tiles pay: with fewer, merging is what takes the time
WORDS_IN_SHARED = gl.NVMMASharedLayout(64, 32, 2)


@gluon.jit
def _words(w_tiles, index):
    """Of 64 lines the words of a block [1, 64, 16]: a thread has 16 bytes in a row."""
    ROWS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]], lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 16],
    )  # fmt: skip
    words = w_tiles.index(index).load(ROWS).reshape([1, 64, 16])
    return gl.convert_layout(words, word_layout(64, 4, False), assert_trivial=True)


@gluon.jit
def _operands(words, known, table_ptr, like: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr, LEFT: gl.constexpr):
    """words [1, 64, 8] → [64, 64] as the matrix units read it from registers."""
    wide = scaled_operands(words, known, table_ptr, like, KIND, ZERO)
    return gl.convert_layout(wide.reshape([wide.shape[1], wide.shape[2]]), LEFT, assert_trivial=True)


@gluon.jit
def _scales(scale_ptr, zero_ptr, first, N, groups, group, ZERO: gl.constexpr):
    """Scales and zeros [1, 64, 1] of the lines from `first` on."""
    LAYOUT: gl.constexpr = word_layout(64, 4, False)
    line = first + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    at = line * groups + group
    zero = gl.full([1, 64, 1], 8, gl.int32, LAYOUT)
    if ZERO:
        zero = gl.load(zero_ptr + at, line < N, 0)
    return gl.load(scale_ptr + at, line < N, 0), zero


@gluon.jit
def _merged(acc_a, acc_b, partial_ptr, counter_ptr, tile, begin, each, blocks, NUMBER: gl.constexpr):
    """Leaves the sums of a part of a tile. Returns whether this was the last part to come, and then all sums."""
    ROWS: gl.constexpr = acc_a.shape[1]
    AREA: gl.constexpr = 64 * ROWS
    LAYOUT: gl.constexpr = acc_a.type.layout
    place = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None] * ROWS
    place += gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    first = tile * blocks
    # A program has at most two parts of tiles: one that it begins with, and one that it ends with.
    mine = 2 * gl.program_id(0) + gl.where(begin < first, 1, 0)
    at = partial_ptr + (2 * mine + NUMBER).to(gl.int64) * (2 * AREA) + place
    gl.store(at, acc_a)
    gl.store(at + AREA, acc_b)
    one = first // each
    last = (first + blocks - 1) // each
    gl.thread_barrier()  # every thread's part is written before one of them says so
    is_last = gl.atomic_add(counter_ptr + 2 * tile + NUMBER, 1, sem="acq_rel") == last - one
    if is_last:
        gl.store(counter_ptr + 2 * tile + NUMBER, 0)
        acc_a = gl.zeros([64, ROWS], gl.float32, LAYOUT)
        acc_b = gl.zeros([64, ROWS], gl.float32, LAYOUT)
        for program in range(one, last + 1):
            part = 2 * program + gl.where(program * each < first, 1, 0)
            at = partial_ptr + (2 * part + NUMBER).to(gl.int64) * (2 * AREA) + place
            # Not through the L1 cache: other processors wrote this a moment ago.
            acc_a += gl.load(at, cache_modifier=".cg")
            acc_b += gl.load(at + AREA, cache_modifier=".cg")
    return is_last, acc_a, acc_b


@gluon.jit
def _consume(
    x_tiles, w_tiles, full, empty, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, out_ptr, partial_ptr,
    counter_ptr, M, N, begin, end, each, blocks, tiles_m, groups, out_stride,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, OUTER: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    like: gl.constexpr = x_tiles.dtype

    tile = begin // blocks
    first = begin - tile * blocks
    first_n = tile // tiles_m * 256 + NUMBER * 128
    group = first * 128 // GROUP
    scale_a, zero_a = _scales(scale_ptr, zero_ptr, first_n, N, groups, group, ZERO)
    scale_b, zero_b = _scales(scale_ptr, zero_ptr, first_n + 64, N, groups, group, ZERO)
    if PDL:
        _asm("griddepcontrol.wait; // $0")
    stage = 0
    parity = 0
    for tile in range(begin // blocks, (end + blocks - 1) // blocks):
        first = gl.maximum(begin - tile * blocks, 0)
        last = gl.minimum(end - tile * blocks, blocks)
        first_n = tile // tiles_m * 256 + NUMBER * 128
        following = (tile + 1) // tiles_m * 256 + NUMBER * 128
        acc_a = gl.zeros([64, ROWS], gl.float32, SUMS)
        acc_b = gl.zeros([64, ROWS], gl.float32, SUMS)
        for block in range(first, last):
            mbarrier.wait(full.index(stage), parity)
            is_end = block + 1 == blocks
            next_n = gl.where(is_end, following, first_n)
            group = gl.where(is_end, 0, block + 1) * 128 // GROUP
            x_early = x_tiles.index(2 * stage).permute([1, 0])
            x_late = x_tiles.index(2 * stage + 1).permute([1, 0])
            early, late = word_halves(_words(w_tiles, 4 * stage + 2 * NUMBER))
            known = factors(scale_a, zero_a, like, KIND, ZERO)
            scale_a, zero_a = _scales(scale_ptr, zero_ptr, next_n, N, groups, group, ZERO)
            left = _operands(early, known, table_ptr, like, KIND, ZERO, LEFT)
            acc_a = warpgroup_mma(left, x_early, acc_a, is_async=True)
            right = _operands(late, known, table_ptr, like, KIND, ZERO, LEFT)
            acc_a = warpgroup_mma(right, x_late, acc_a, is_async=True)
            early, late = word_halves(_words(w_tiles, 4 * stage + 2 * NUMBER + 1))
            known = factors(scale_b, zero_b, like, KIND, ZERO)
            scale_b, zero_b = _scales(scale_ptr, zero_ptr, next_n + 64, N, groups, group, ZERO)
            acc_a, left = warpgroup_mma_wait(1, deps=[acc_a, left])
            left = _operands(early, known, table_ptr, like, KIND, ZERO, LEFT)
            acc_b = warpgroup_mma(left, x_early, acc_b, is_async=True)
            acc_a, right = warpgroup_mma_wait(1, deps=[acc_a, right])
            right = _operands(late, known, table_ptr, like, KIND, ZERO, LEFT)
            acc_b = warpgroup_mma(right, x_late, acc_b, is_async=True)
            acc_b, left, right = warpgroup_mma_wait(0, deps=[acc_b, left, right])
            mbarrier.arrive(empty.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
        is_done = last - first == blocks
        if not is_done:
            is_done, acc_a, acc_b = _merged(
                acc_a, acc_b, partial_ptr, counter_ptr, tile, begin, each, blocks, NUMBER
            )  # fmt: skip
        if is_done:
            SHIFT: gl.constexpr = shift(like, KIND, ZERO)
            first_m = tile % tiles_m * ROWS
            store_outputs(
                acc_a * SHIFT, out_ptr, outer_ptr, bias_ptr, first_m, first_n, M, N, out_stride,
                OUTER, BIAS, RESIDUAL,
            )  # fmt: skip
            store_outputs(
                acc_b * SHIFT, out_ptr, outer_ptr, bias_ptr, first_m, first_n + 64, M, N, out_stride,
                OUTER, BIAS, RESIDUAL,
            )  # fmt: skip


@gluon.jit
def _produce(
    x_desc, w_desc, x_tiles, w_tiles, full, empty, begin, end, blocks, tiles_m, PDL: gl.constexpr,
):  # fmt: skip
    """No kernel before this one writes the weight: of that the ring's fill is asked for before those have ended."""
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    BYTES: gl.constexpr = ROWS * 256 + 256 * 64
    wide = w_tiles._reinterpret(w_tiles.dtype, [STAGES, 256, 16], w_tiles.type.layout)
    for unit in range(begin, gl.minimum(begin + STAGES, end)):
        tile = unit // blocks
        stage = unit - begin
        mbarrier.expect(full.index(stage), BYTES)
        at = [tile // tiles_m * 256, (unit - tile * blocks) * 16]
        tma.async_copy_global_to_shared(w_desc, at, full.index(stage), wide.index(stage))
    if PDL:
        _asm("griddepcontrol.wait; // $0")
    stage = 0
    parity = 1
    for unit in range(begin, end):
        tile = unit // blocks
        block = unit - tile * blocks
        row = tile % tiles_m * ROWS
        if unit >= begin + STAGES:
            mbarrier.wait(empty.index(stage), parity)
            mbarrier.expect(full.index(stage), BYTES)
            at = [tile // tiles_m * 256, block * 16]
            tma.async_copy_global_to_shared(w_desc, at, full.index(stage), wide.index(stage))
        column = block * 128
        tma.async_copy_global_to_shared(x_desc, [row, column], full.index(stage), x_tiles.index(2 * stage))
        tma.async_copy_global_to_shared(x_desc, [row, column + 64], full.index(stage), x_tiles.index(2 * stage + 1))
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1


@gluon.jit(do_not_specialize=["M", "each"])
def _tall_tiles_kernel(
    x_desc, w_desc, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr,
    M, N, each, blocks, groups, out_stride,
    STAGES: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, OUTER: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    tiles_m = (M + ROWS - 1) // ROWS
    tiles_n = (N + 255) // 256
    begin = gl.program_id(0) * each
    end = gl.minimum(begin + each, tiles_m * tiles_n * blocks)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, 64], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [4 * STAGES, 64, 16], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    if PDL:
        _asm("griddepcontrol.launch_dependents; // $0")
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                x_tiles, w_tiles, full, empty, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, out_ptr,
                partial_ptr, counter_ptr, M, N, begin, end, each, blocks, tiles_m, groups, out_stride,
                KIND, GROUP, ZERO, OUTER, BIAS, RESIDUAL, PDL, FIRST,
            )),
            (_consume, (
                x_tiles, w_tiles, full, empty, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, out_ptr,
                partial_ptr, counter_ptr, M, N, begin, end, each, blocks, tiles_m, groups, out_stride,
                KIND, GROUP, ZERO, OUTER, BIAS, RESIDUAL, PDL, SECOND,
            )),
            (_produce, (x_desc, w_desc, x_tiles, w_tiles, full, empty, begin, end, blocks, tiles_m, PDL)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],  # theirs; the first consumer gets the rest, as many as the second
    )  # fmt: skip


def pays(x: torch.Tensor, weight: Codes) -> bool:
    """Whether `linear` takes these, x [m, k], and beats smaller tiles: each block's columns have one scale, the copy
    engine can read x and the codes, each tile has a counter, and there is much to do."""
    readable = x.stride(1) == 1 and all(
        row * one.element_size() % 16 == 0 and one.data_ptr() % 16 == 0
        for one, row in ((x, x.stride(0)), (weight.codes, weight.codes.stride(0)))
    )
    tiles = _tiles(min(len(x), MOST_ROWS), len(weight.codes))
    is_much = tiles * (x.shape[1] // BLOCK) >= MANY * num_processors(x.device)
    return weight.group % BLOCK == 0 and readable and 2 * tiles <= MAX_TILES and is_much


def _rows(m: int) -> int:
    return 32 if m <= 32 else 64 if m <= 64 else 128


def _tiles(m: int, n: int) -> int:
    return -(-m // _rows(m)) * -(-n // LINES)


def linear(
    x: torch.Tensor, weight: Codes, bias: torch.Tensor | None, residual: bool, out: torch.Tensor
) -> torch.Tensor:
    """x [m, k] for which it `pays` → out [m, n]; with `residual` the result is added to what stands there."""
    (m, k), n = x.shape, out.shape[1]
    rows, tiles, blocks = _rows(m), _tiles(m, n), k // BLOCK
    work = tiles * blocks
    each = -(-work // num_processors(x.device))
    programs = -(-work // each)
    codes, scale, zero, outer, table = arguments(weight)
    partial = torch.empty(2 * programs * LINES * rows, dtype=torch.float32, device=x.device)
    pdl = has_pdl(x.device)
    _tall_tiles_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [rows, HALF], SWIZZLED),
        TensorDescriptor.from_tensor(codes.view(torch.int32), [LINES, BLOCK // 8], WORDS_IN_SHARED),
        scale, zero, outer, table, x if bias is None else bias, out, partial,
        _counters(x.device, torch.cuda.current_stream(x.device).cuda_stream), m, n, each, blocks,
        scale.shape[1], out.stride(0), STAGES={32: 8, 64: 6, 128: 4}[rows], KIND=KINDS[weight.kind],
        GROUP=weight.group, ZERO=weight.zero is not None, OUTER=weight.outer is not None, BIAS=bias is not None,
        RESIDUAL=residual, PDL=pdl, CONSUMER_REGISTERS=232, PRODUCER_REGISTERS=40, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
