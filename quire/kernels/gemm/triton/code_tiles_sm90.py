"""x @ weight.T for 17 to some hundred rows and a weight in codes of 4 bits, for compute capability 9.0, in Gluon.

The weight is the tall operand and comes out of registers, as in `code_rows`. Warps have roles: the producer keeps the
bulk copy engine busy with blocks of 128 columns of x, which both consumers read from shared memory. A consumer, four
warps, has 64 lines of the weight: while the matrix units are at one half of a block it makes the other half's operands,
and what a line has in common in a block is multiplied into its sums.

The work is all blocks of all tiles in a row, dealt out evenly by fours or twos: each processor has one program, which
begins and ends amid a tile. Who has part of a tile leaves its sums in a workspace; the one that comes last (a counter a
tile, set back to zero by the one who merges) adds them up in order, so a result does not depend on who came when.
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
from quire.kernels.gemm.triton.code_words import factor, negated_zeros, operands, word_halves, word_layout
from quire.kernels.gemm.triton.codes import KINDS, arguments
from quire.kernels.gemm.triton.pipeline_sm90 import SWIZZLED, follow
from quire.kernels.triton.launch import has_pdl, num_processors

LINES = 64  # of the weight, a consumer
MOST_ROWS = 384  # by reckoning: at 256 tiles were faster than the widened weight, at 512 both move about as much


@gluon.jit
def _operands(
    words, less, table_ptr, like: gl.constexpr, KIND: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """words [1, lines, 8] → [lines, 64] as the matrix units read it from registers."""
    less = gl.convert_layout(less, words.type.layout, assert_trivial=True)
    wide = operands(words, less, table_ptr, like, KIND)
    return gl.convert_layout(wide.reshape([wide.shape[1], wide.shape[2]]), LEFT, assert_trivial=True)


@gluon.jit
def _less(zero_ptr, line, N, groups, group, like: gl.constexpr, KIND: gl.constexpr, ZERO: gl.constexpr):
    """See `negated_zeros`, of the lines in one group."""
    zero = gl.full([1, 64, 1], 8, gl.int32, line.type.layout)
    if ZERO:
        zero = gl.load(zero_ptr + line.to(gl.int64) * groups + group, line < N, 0)
    return negated_zeros(zero, like, KIND)


@gluon.jit
def _fetched(
    words_ptr, scale_ptr, zero_ptr, first, block, blocks, N, words_stride, groups,
    like: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    WORDS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Of a block of the 64 lines from `first` on the words [1, 64, 16], what `operands` adds, and scales [64]. Behind
    the last block there are zeros."""
    line = first + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :, None]
    word = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    there = block < blocks
    words = gl.load(words_ptr + line.to(gl.int64) * words_stride + block * 16 + word, (line < N) & there, 0)
    group = gl.minimum(block, blocks - 1) * 128 // GROUP
    less = _less(zero_ptr, line, N, groups, group, like, KIND, ZERO)
    of = first + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    scale = gl.load(scale_ptr + of.to(gl.int64) * groups + group, (of < N) & there, 0)
    return words, less, scale


@gluon.jit
def store_outputs(
    y, out_ptr, outer_ptr, bias_ptr, first_m, first_n, M, N, out_stride,
    OUTER: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """What follows the product y [lines, rows]: factors, bias, sum with what is there, store."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    y = gl.convert_layout(y, LAYOUT)
    n = first_n + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    m = first_m + gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))
    at = out_ptr + m.to(gl.int64)[None, :] * out_stride + n[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    if OUTER:
        y *= gl.load(outer_ptr + n, n < N, 0.0)[:, None]
    if BIAS:
        y += gl.load(bias_ptr + n, n < N, 0.0).to(gl.float32)[:, None]
    if RESIDUAL:
        y += gl.load(at, inside, 0.0).to(gl.float32)
    gl.store(at, y.to(out_ptr.dtype.element_ty), inside)


@gluon.jit
def _merged(acc, partial_ptr, counter_ptr, tile, begin, each, blocks, NUMBER: gl.constexpr):
    """Leaves the sums of a part of a tile. Returns whether this was the last part to come, and then all sums."""
    ROWS: gl.constexpr = acc.shape[1]
    AREA: gl.constexpr = 64 * ROWS
    LAYOUT: gl.constexpr = acc.type.layout
    place = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None] * ROWS
    place += gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    first = tile * blocks
    # A program has at most two parts of tiles: one that it begins with, and one that it ends with.
    mine = 2 * gl.program_id(0) + gl.where(begin < first, 1, 0)
    gl.store(partial_ptr + (2 * mine + NUMBER).to(gl.int64) * AREA + place, acc)
    one = first // each
    last = (first + blocks - 1) // each
    gl.thread_barrier()  # every thread's part is written before one of them says so
    is_last = gl.atomic_add(counter_ptr + 2 * tile + NUMBER, 1, sem="acq_rel") == last - one
    if is_last:
        gl.store(counter_ptr + 2 * tile + NUMBER, 0)
        acc = gl.zeros([64, ROWS], gl.float32, LAYOUT)
        for program in range(one, last + 1):
            part = 2 * program + gl.where(program * each < first, 1, 0)
            # Not through the L1 cache: other processors wrote this a moment ago.
            acc += gl.load(partial_ptr + (2 * part + NUMBER).to(gl.int64) * AREA + place, cache_modifier=".cg")
    return is_last, acc


@gluon.jit
def _consume(
    x_tiles, full, empty, words_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, out_ptr, partial_ptr,
    counter_ptr, M, N, begin, end, each, blocks, tiles_m, words_stride, groups, out_stride,
    KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, OUTER: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, AHEAD: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    WORDS: gl.constexpr = word_layout(64, 4, False)
    like: gl.constexpr = x_tiles.dtype

    padded = (blocks + AHEAD - 1) // AHEAD * AHEAD
    tile = begin // padded
    block = begin - tile * padded
    first_n = (2 * (tile // tiles_m) + NUMBER) * 64
    words, lesses, scales = (), (), ()
    for i in gl.static_range(AHEAD):
        one, less, scale = _fetched(
            words_ptr, scale_ptr, zero_ptr, first_n, block + i, blocks, N, words_stride, groups,
            like, KIND, GROUP, ZERO, WORDS, SUMS,
        )  # fmt: skip
        words += (one,)
        lesses += (less,)
        scales += (scale,)
    acc = gl.zeros([64, ROWS], gl.float32, SUMS)
    nothing = gl.zeros([64, ROWS], gl.float32, SUMS)
    early, late = word_halves(words[0])
    left = _operands(early, lesses[0], table_ptr, like, KIND, LEFT)
    stage = 0
    parity = 0
    for unit in range(begin, end, AHEAD):
        next_tile, next_block = tile, block + AHEAD
        if next_block == padded:
            next_tile, next_block = tile + 1, 0
        next_n = (2 * (next_tile // tiles_m) + NUMBER) * 64
        for i in gl.static_range(AHEAD):
            mbarrier.wait(full.index(stage), parity)
            mixed = warpgroup_mma(
                left, x_tiles.index(2 * stage).permute([1, 0]), nothing, use_acc=False, is_async=True
            )  # fmt: skip
            right = _operands(late, lesses[0], table_ptr, like, KIND, LEFT)
            mixed = warpgroup_mma(right, x_tiles.index(2 * stage + 1).permute([1, 0]), mixed, is_async=True)
            if i == 0:  # all of the next turn: neighbours in memory, and far ahead
                for j in gl.static_range(AHEAD):
                    one, less, scale = _fetched(
                        words_ptr, scale_ptr, zero_ptr, next_n, next_block + j, blocks, N, words_stride, groups,
                        like, KIND, GROUP, ZERO, WORDS, SUMS,
                    )  # fmt: skip
                    words += (one,)
                    lesses += (less,)
                    scales += (scale,)
            words, lesses = words[1:], lesses[1:]
            early, late = word_halves(words[0])
            next_left = _operands(early, lesses[0], table_ptr, like, KIND, LEFT)
            sums, left, right = warpgroup_mma_wait(0, deps=[mixed, left, right])
            mbarrier.arrive(empty.index(stage), count=1)
            acc += sums * factor(scales[0])[:, None]
            scales = scales[1:]
            left = next_left
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
        if (unit + AHEAD >= end) | (next_block == 0):
            is_done = (begin <= tile * padded) & (next_block == 0)
            if not is_done:
                is_done, acc = _merged(acc, partial_ptr, counter_ptr, tile, begin, each, padded, NUMBER)
            if is_done:
                store_outputs(
                    acc, out_ptr, outer_ptr, bias_ptr, tile % tiles_m * ROWS, first_n, M, N, out_stride,
                    OUTER, BIAS, RESIDUAL,
                )  # fmt: skip
            acc = gl.zeros([64, ROWS], gl.float32, SUMS)
        tile, block, first_n = next_tile, next_block, next_n


@gluon.jit
def _produce(x_desc, x_tiles, full, empty, begin, end, blocks, tiles_m, AHEAD: gl.constexpr):
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    padded = (blocks + AHEAD - 1) // AHEAD * AHEAD
    stage = 0
    parity = 1
    for unit in range(begin, end):
        tile = unit // padded
        row = tile % tiles_m * ROWS
        column = (unit - tile * padded) * 128  # behind the last one the copy engine reads zeros
        mbarrier.wait(empty.index(stage), parity)
        mbarrier.expect(full.index(stage), ROWS * 256)
        tma.async_copy_global_to_shared(x_desc, [row, column], full.index(stage), x_tiles.index(2 * stage))
        tma.async_copy_global_to_shared(x_desc, [row, column + 64], full.index(stage), x_tiles.index(2 * stage + 1))
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1


@gluon.jit(do_not_specialize=["M", "each"])
def _code_tiles_kernel(
    x_desc, words_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr,
    M, N, each, blocks, words_stride, groups, out_stride,
    STAGES: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, OUTER: gl.constexpr,
    BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
    AHEAD: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    tiles_m = (M + ROWS - 1) // ROWS
    tiles_n = (N + 127) // 128
    begin = gl.program_id(0) * each
    padded = (blocks + AHEAD - 1) // AHEAD * AHEAD
    end = gl.minimum(begin + each, tiles_m * tiles_n * padded)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    follow(PDL)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                x_tiles, full, empty, words_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, out_ptr,
                partial_ptr, counter_ptr, M, N, begin, end, each, blocks, tiles_m, words_stride, groups, out_stride,
                KIND, GROUP, ZERO, OUTER, BIAS, RESIDUAL, AHEAD, FIRST,
            )),
            (_consume, (
                x_tiles, full, empty, words_ptr, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, out_ptr,
                partial_ptr, counter_ptr, M, N, begin, end, each, blocks, tiles_m, words_stride, groups, out_stride,
                KIND, GROUP, ZERO, OUTER, BIAS, RESIDUAL, AHEAD, SECOND,
            )),
            (_produce, (x_desc, x_tiles, full, empty, begin, end, blocks, tiles_m, AHEAD)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],  # theirs; the first consumer gets the rest, as many as the second
    )  # fmt: skip


def takes(x: torch.Tensor, weight: Codes) -> bool:
    """Whether each block's columns have one scale, the copy engine can read x [m, k], and each tile has a counter."""
    readable = x.stride(0) % 8 == 0 and x.stride(1) == 1 and x.data_ptr() % 16 == 0
    tiles = _tiles(min(len(x), MOST_ROWS), len(weight.codes))
    return weight.group % BLOCK == 0 and readable and 2 * tiles <= MAX_TILES


def _rows(m: int) -> int:
    return 32 if m <= 32 else 64 if m <= 64 else 128


def _tiles(m: int, n: int) -> int:
    return -(-m // _rows(m)) * -(-n // (2 * LINES))


def linear(
    x: torch.Tensor, weight: Codes, bias: torch.Tensor | None, residual: bool, out: torch.Tensor
) -> torch.Tensor:
    """x [m, k] that it `takes` → out [m, n]; with `residual` the result is added to what stands there."""
    (m, k), n = x.shape, out.shape[1]
    rows, tiles, blocks = _rows(m), _tiles(m, n), k // BLOCK
    # Blocks of a turn of the loop, in which those of the next are on their way: as many as registers hold.
    ahead = 4 if rows <= 64 else 2
    work = tiles * -(-blocks // ahead)
    each = -(-work // num_processors(x.device))
    programs = -(-work // each)
    codes, scale, zero, outer, table = arguments(weight)
    partial = torch.empty(4 * programs * LINES * rows, dtype=torch.float32, device=x.device)
    pdl = has_pdl(x.device)
    _code_tiles_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [rows, HALF], SWIZZLED), codes.view(torch.int32), scale, zero, outer,
        table, x if bias is None else bias, out, partial,
        _counters(x.device, torch.cuda.current_stream(x.device).cuda_stream), m, n, each * ahead, blocks,
        codes.stride(0) // 4, scale.shape[1], out.stride(0), STAGES=8 if rows <= 64 else 6, KIND=KINDS[weight.kind],
        GROUP=weight.group, ZERO=weight.zero is not None, OUTER=weight.outer is not None, BIAS=bias is not None,
        RESIDUAL=residual, AHEAD=ahead, PDL=pdl, CONSUMER_REGISTERS=232, PRODUCER_REGISTERS=40, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
