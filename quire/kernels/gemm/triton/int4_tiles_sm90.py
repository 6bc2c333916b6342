"""x @ weight.T for 9 to some hundred rows and a weight of 4-bit integers, for compute capability 9.0, in Gluon.

The weight is the tall operand and comes out of registers, as in `code_rows`. Warps have roles: the producer keeps the
bulk copy engine busy with blocks of 128 columns of x and of 128 lines of the weight's words. A consumer, four warps,
has 64 of the lines; with a gate as many gates and their ups, so that it is applied where the sums are. It takes them in
steps of 64 columns: while the matrix units are at one it makes the next one's operands, and once in a turn of two
blocks it waits for all. (Where the units still read registers as a loop begins anew, the assembler lets them do one
thing at a time.) Scales go into operands, which are rounded once, so sums stay where they are from a tile's first block
to its last.

The work is all blocks of all tiles in a row, dealt out evenly: each processor has one program, which begins and ends
amid a tile. It takes its tiles from the last to the first: the sums of one that it does not finish are left in a
workspace at once, long before the program that has this tile's last block adds them to its own, in their order, so a
result does not depend on who came when. Who waits, waits for programs that were launched before it.
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
from quire.kernels.gemm.triton.code_words import factors, scaled_operands, shift, word_halves, word_layout
from quire.kernels.gemm.triton.pipeline_sm90 import SWIZZLED, _asm
from quire.kernels.triton.launch import has_pdl, num_processors

LINES = 128  # of the weight, a tile; with a gate twice as many
TURN = 2  # blocks
RING_BYTES = 192 * 1024  # of a processor's shared memory: of the rest is made what puts sums in the order of rows
MOST_STAGES = 12
MANY = 13  # blocks of 128 lines a processor, from which on 128 rows a tile pay, and tiles for no more than 16 rows
FEWEST_ROWS, MOST_ROWS = 9, 384
MOST_GATED_ROWS = 16  # what of more rows was checked was right and faster, but not all was (`test_tiles_of_integers`)
WORDS_IN_SHARED = gl.NVMMASharedLayout(64, 32, 2)
INT4 = gl.constexpr(0)  # of `KINDS`


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
def _step(words, known, x_tile, acc, scale_ptr, LEFT: gl.constexpr):
    """Sends 64 lines and 64 columns, words [1, 64, 8], to the matrix units; no more than these are under way then."""
    wide = scaled_operands(words, known, scale_ptr, x_tile.dtype, INT4, False)
    left = gl.convert_layout(wide.reshape([wide.shape[1], wide.shape[2]]), LEFT, assert_trivial=True)
    acc = warpgroup_mma(left, x_tile, acc, is_async=True)
    return warpgroup_mma_wait(1, deps=[acc])


@gluon.jit
def _scales(scale_ptr, first, lines, groups, block):
    """Scales [1, 64, 1] of the lines from `first` on. Behind the last of `lines`, and of a line's blocks, there are
    some."""
    LAYOUT: gl.constexpr = word_layout(64, 4, False)
    line = first + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    return gl.load(scale_ptr + (gl.minimum(line, lines - 1) * groups + gl.minimum(block, groups - 1)))


@gluon.jit
def _in_line(acc):
    """[64, rows] → [64 rows], a thread's four in a row and a warp's 128: columns by 16, and of these the first 8 lines
    of each 16 and the others."""
    SIXTEENS: gl.constexpr = acc.shape[1] // 16
    y = acc.reshape([4, 2, 8, SIXTEENS, 2, 4, 2]).permute([3, 1, 0, 2, 5, 4, 6])
    return y.reshape([acc.shape[0] * acc.shape[1]])


@gluon.jit
def _in_lines(y, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """And back, [64, rows]."""
    y = y.reshape([ROWS // 16, 2, 4, 8, 4, 2, 2]).permute([2, 1, 3, 0, 5, 4, 6]).reshape([64, ROWS])
    return gl.convert_layout(y, LAYOUT, assert_trivial=True)


@gluon.jit
def _await(counter_ptr, count):
    """Until the counter is that far; what was written before it was counted may be read then."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 v; again: ld.acquire.gpu.global.b32 v, [$1]; setp.lt.s32 p, v, $2; @p bra again; "
        "mov.b32 $0, v; }",
        "=r,l,r", [counter_ptr, count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _store(y, n, m, out_ptr, M, N, out_stride, RESIDUAL: gl.constexpr):
    at = out_ptr + m.to(gl.int64) * out_stride + n
    inside = (n < N) & (m < M)
    if RESIDUAL:
        # Not through the L1 cache: of those who share a processor's, another one writes the new ones.
        y += gl.load(at, inside, 0.0, cache_modifier=".cg").to(gl.float32)
    gl.store(at, y.to(out_ptr.dtype.element_ty), inside)


@gluon.jit
def _store_tile(
    sums, out_ptr, first_m, first_n, M, N, out_stride,
    SHIFT: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """What follows the sums [64, rows], with a gate of gates and ups: gate, sum with what is there, store."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    n = first_n + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    m = first_m + gl.arange(0, sums[0].shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    y = gl.convert_layout(sums[0] * SHIFT, LAYOUT)
    if GATED:
        up = gl.convert_layout(sums[1] * SHIFT, LAYOUT)
        y = y / (1.0 + gl.exp(-y)) * up
    _store(y, n, m, out_ptr, M, N, out_stride, RESIDUAL)


@gluon.jit
def _count(counter_ptr, most):
    """One more; after `most` there is 0. What this consumer has written is seen by those who see the count."""
    gl.thread_barrier()
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.s32 p, t, 0; "
        "@p fence.acq_rel.gpu; @p red.relaxed.gpu.global.inc.u32 [$1], $2; mov.b32 $0, t; }",
        "=r,l,r", [counter_ptr, most], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _leave(sums, partial_ptr, NUMBER: gl.constexpr):
    """Writes a part's sums to the workspace."""
    HALVES: gl.constexpr = len(sums)
    AREA: gl.constexpr = 64 * sums[0].shape[1]
    at = partial_ptr + (2 * gl.program_id(0) + NUMBER).to(gl.int64) * (HALVES * AREA)
    for half in gl.static_range(HALVES):
        y = _in_line(sums[half])
        gl.store(at + half * AREA + gl.arange(0, AREA, y.type.layout), y)


@gluon.jit
def _collected(sums, partial_ptr, counter_ptr, first, ROWS: gl.constexpr, NUMBER: gl.constexpr):
    """The sums of a tile whose other parts the programs from `first` on have left."""
    HALVES: gl.constexpr = len(sums)
    AREA: gl.constexpr = 64 * ROWS
    SUMS: gl.constexpr = sums[0].type.layout
    others = gl.program_id(0) - first
    _await(counter_ptr, others)
    _count(counter_ptr, others)
    at = partial_ptr + (2 * first + NUMBER).to(gl.int64) * (HALVES * AREA)
    found = ()
    for half in gl.static_range(HALVES):
        y = _in_line(sums[half])
        place = at + half * AREA + gl.arange(0, AREA, y.type.layout)
        for _ in range(others):
            y += gl.load(place, cache_modifier=".cg")
            place += 2 * HALVES * AREA
        found += (_in_lines(y, ROWS, SUMS),)
    return found


@gluon.jit
def _after(n, m, block, start, begin, end, blocks, tiles_m):
    """Column and row of the tile, the block in it and its first block in all that follow: tiles from the last to the
    first."""
    if start + block + 1 == gl.minimum(end, start + blocks):
        start -= blocks
        block = gl.maximum(begin - start, 0)
        m -= 1
        if m < 0:
            m = tiles_m - 1
            n -= 1
    else:
        block += 1
    return n, m, block, start


@gluon.jit
def _consume(
    x_tiles, w_tiles, full, empty, scale_ptr, out_ptr, partial_ptr, counter_ptr, M, N, begin, end, each, blocks,
    tiles_m, groups, out_stride,
    GATED: gl.constexpr, RESIDUAL: gl.constexpr, TURN: gl.constexpr, PDL: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    HALVES: gl.constexpr = 2 if GATED else 1
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    like: gl.constexpr = x_tiles.dtype
    SHIFT: gl.constexpr = shift(like, INT4, False)

    lines = HALVES * N
    tile = (end - 1) // blocks
    start = tile * blocks
    block = gl.maximum(begin - start, 0)
    n = tile // tiles_m
    m = tile - n * tiles_m
    first_n = n * 128 + NUMBER * 64
    scales = ()
    for half in gl.static_range(HALVES):
        scales += (_scales(scale_ptr, first_n + half * N, lines, groups, block),)
    if PDL:
        _asm("griddepcontrol.wait; // $0")
    stage = 0
    parity = 0
    before = 0
    for _ in range(tile, begin // blocks - 1, -1):
        sums = ()
        for _ in gl.static_range(HALVES):
            sums += (gl.zeros([64, ROWS], gl.float32, SUMS),)
        last = gl.minimum(end - start, blocks)
        first_n = n * 128 + NUMBER * 64
        next_n, next_m, next_first, next_start = _after(n, m, last - 1, start, begin, end, blocks, tiles_m)
        following = gl.maximum(next_n, 0) * 128 + NUMBER * 64
        first = block
        for block in range(first, last, TURN):
            for j in gl.static_range(TURN):
                is_end = block + j + 1 == last
                next_line = gl.where(is_end, following, first_n)
                next_block = gl.where(is_end, next_first, block + j + 1)
                mbarrier.wait(full.index(stage), parity)
                x_early = x_tiles.index(2 * stage).permute([1, 0])
                x_late = x_tiles.index(2 * stage + 1).permute([1, 0])
                words = _words(w_tiles, 2 * HALVES * stage + NUMBER)
                for half in gl.static_range(HALVES):
                    early, late = word_halves(words)
                    known = factors(scales[0], 8, like, INT4, False)
                    acc = _step(early, known, x_early, sums[0], scale_ptr, LEFT)
                    if half + 1 < HALVES:
                        words = _words(w_tiles, 2 * HALVES * stage + 2 * half + 2 + NUMBER)
                    acc = _step(late, known, x_late, acc, scale_ptr, LEFT)
                    if j > 0 and half == 0:
                        mbarrier.arrive(empty.index(before), count=1)
                    scale = _scales(scale_ptr, next_line + half * N, lines, groups, next_block)
                    sums, scales = sums[1:], scales[1:]
                    sums += (acc,)
                    scales += (scale,)
                before = stage
                stage += 1
                if stage == STAGES:
                    stage = 0
                    parity ^= 1
            if GATED:
                gates, ups = warpgroup_mma_wait(0, deps=[sums[0], sums[1]])
                sums = (gates, ups)
            else:
                sums = (warpgroup_mma_wait(0, deps=[sums[0]]),)
            mbarrier.arrive(empty.index(before), count=1)
        counter = counter_ptr + 2 * (n * tiles_m + m) + NUMBER
        first_program = start // each
        if end < start + blocks:
            _leave(sums, partial_ptr, NUMBER)
            _count(counter, (start + blocks - 1) // each - first_program)
        else:
            if begin > start:
                sums = _collected(sums, partial_ptr, counter, first_program, ROWS, NUMBER)
            _store_tile(sums, out_ptr, m * ROWS, first_n, M, N, out_stride, SHIFT, GATED, RESIDUAL)
        n, m, block, start = next_n, next_m, next_first, next_start


@gluon.jit
def _send_words(w_desc, w_tiles, full, stage, n, block, N):
    STAGES: gl.constexpr = full.shape[0]
    HALVES: gl.constexpr = w_tiles.shape[0] // (2 * STAGES)
    halves = w_tiles._reinterpret(w_tiles.dtype, [HALVES * STAGES, 128, 16], w_tiles.type.layout)
    for half in gl.static_range(HALVES):
        at = [n * 128 + half * N, block * 16]
        tma.async_copy_global_to_shared(w_desc, at, full.index(stage), halves.index(HALVES * stage + half))


@gluon.jit
def _produce(
    x_desc, w_desc, x_tiles, w_tiles, full, empty, begin, end, blocks, tiles_m, N,
    PDL: gl.constexpr,
):  # fmt: skip
    """No kernel before this one writes the weight: of that the ring's fill is asked for before those have ended."""
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    BYTES: gl.constexpr = ROWS * 256 + w_tiles.shape[0] // STAGES * 64 * 64
    last = (end - 1) // blocks
    last_n = last // tiles_m
    last_m = last - last_n * tiles_m
    n, m, start = last_n, last_m, last * blocks
    block = gl.maximum(begin - start, 0)
    for stage in range(gl.minimum(STAGES, end - begin)):
        mbarrier.expect(full.index(stage), BYTES)
        _send_words(w_desc, w_tiles, full, stage, n, block, N)
        n, m, block, start = _after(n, m, block, start, begin, end, blocks, tiles_m)
    if PDL:
        _asm("griddepcontrol.wait; // $0")
    n, m, start = last_n, last_m, last * blocks
    block = gl.maximum(begin - start, 0)
    stage = 0
    parity = 1
    for unit in range(end - begin):
        if unit >= STAGES:
            mbarrier.wait(empty.index(stage), parity)
            mbarrier.expect(full.index(stage), BYTES)
            _send_words(w_desc, w_tiles, full, stage, n, block, N)
        row = m * ROWS
        column = block * 128
        tma.async_copy_global_to_shared(x_desc, [row, column], full.index(stage), x_tiles.index(2 * stage))
        tma.async_copy_global_to_shared(x_desc, [row, column + 64], full.index(stage), x_tiles.index(2 * stage + 1))
        n, m, block, start = _after(n, m, block, start, begin, end, blocks, tiles_m)
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1


@gluon.jit(do_not_specialize=["M", "each"])
def _int4_tiles_kernel(
    x_desc, w_desc, scale_ptr, out_ptr, partial_ptr, counter_ptr, M, N, each, blocks, groups, out_stride,
    STAGES: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr, TURN: gl.constexpr, PDL: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    HALVES: gl.constexpr = 2 if GATED else 1
    tiles_m = (M + ROWS - 1) // ROWS
    tiles_n = (N + 127) // 128
    begin = gl.program_id(0) * each
    end = gl.minimum(begin + each, tiles_m * tiles_n * blocks)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, 64], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [2 * HALVES * STAGES, 64, 16], w_desc.layout)
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
                x_tiles, w_tiles, full, empty, scale_ptr, out_ptr, partial_ptr, counter_ptr, M, N, begin, end, each,
                blocks, tiles_m, groups, out_stride, GATED, RESIDUAL, TURN, PDL, FIRST,
            )),
            (_consume, (
                x_tiles, w_tiles, full, empty, scale_ptr, out_ptr, partial_ptr, counter_ptr, M, N, begin, end, each,
                blocks, tiles_m, groups, out_stride, GATED, RESIDUAL, TURN, PDL, SECOND,
            )),
            (_produce, (x_desc, w_desc, x_tiles, w_tiles, full, empty, begin, end, blocks, tiles_m, N, PDL)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],  # theirs; the first consumer gets the rest, as many as the second
    )  # fmt: skip


def takes(x: torch.Tensor, weight: Codes, bias: torch.Tensor | None, gated: bool) -> bool:
    """Whether `linear` takes these, x [m, k]: all of bfloat16, integers without zeros and a scale for 128 columns, no
    bias; the copy engine can read x and the codes, each tile has a counter, and for few rows there is much to do."""
    m, n, k = len(x), len(weight.codes), x.shape[1]
    if weight.kind != "int4" or weight.group != BLOCK or any(y is not None for y in (weight.zero, weight.outer, bias)):
        return False
    if x.dtype != torch.bfloat16 or weight.scale.dtype != torch.bfloat16:
        return False
    readable = x.stride(1) == 1 and all(
        row * one.element_size() % 16 == 0 and one.data_ptr() % 16 == 0
        for one, row in ((x, x.stride(0)), (weight.codes, weight.codes.stride(0)))
    )
    processors, tiles_n = num_processors(x.device), -(-n // LINES)
    is_much = m > 16 or tiles_n * (k // BLOCK) >= MANY * processors
    has_counters = 2 * -(-m // _rows(m, n, k, gated, processors)) * tiles_n <= MAX_TILES
    return readable and has_counters and is_much and FEWEST_ROWS <= m <= (MOST_GATED_ROWS if gated else MOST_ROWS)


def _rows(m: int, n: int, k: int, gated: bool, processors: int) -> int:
    """Of a tile. More than 64 share what is read of the weight, and leave larger parts to be added up."""
    if gated:
        return 16 if m <= 16 else 64
    if m <= 64:
        return 16 if m <= 16 else 32 if m <= 32 else 64
    return 128 if -(-m // 128) * -(-n // LINES) * (k // BLOCK) >= MANY * processors else 64


def linear(x: torch.Tensor, weight: Codes, gated: bool, residual: bool, out: torch.Tensor) -> torch.Tensor:
    """x [m, k] that it `takes` → out [m, n]; with `residual` the result is added to what stands there. gated: the
    weight's lines are gates and then ups, the result silu(gate) · up."""
    (m, k), n = x.shape, out.shape[1]
    processors = num_processors(x.device)
    rows = _rows(m, n, k, gated, processors)
    blocks = -(-k // (TURN * BLOCK)) * TURN  # behind the last column the copy engine reads zeros
    work = -(-m // rows) * -(-n // LINES) * (blocks // TURN)
    each = -(-work // processors)
    programs = -(-work // each)
    partial = torch.empty(programs * (2 if gated else 1) * LINES * rows, dtype=torch.float32, device=x.device)
    pdl = has_pdl(x.device)
    _int4_tiles_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [rows, HALF], SWIZZLED),
        TensorDescriptor.from_tensor(weight.codes.view(torch.int32), [LINES, BLOCK // 8], WORDS_IN_SHARED),
        weight.scale, out, partial, _counters(x.device, torch.cuda.current_stream(x.device).cuda_stream), m, n,
        each * TURN, blocks, weight.scale.shape[1], out.stride(0), STAGES=stages(rows, gated), GATED=gated,
        RESIDUAL=residual, TURN=TURN, PDL=pdl, CONSUMER_REGISTERS=232, PRODUCER_REGISTERS=40, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def stages(rows: int, gated: bool) -> int:
    """Of the ring, for so many rows a tile."""
    lines = 2 * LINES if gated else LINES
    return min(RING_BYTES // (rows * BLOCK * 2 + lines * HALF), MOST_STAGES)
