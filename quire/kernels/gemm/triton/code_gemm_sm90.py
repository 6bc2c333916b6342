"""x @ weight.T for 9 rows or more and a weight in codes, for compute capability 9.0, in Gluon.

The weight is the tall operand and comes out of registers, as in `code_rows`. Warps have roles: the producer keeps the
bulk copy engine busy with blocks of 128 columns of x and of the weight's codes. A consumer, four warps, has 64 of the
weight's lines, or two times 64: with a gate as many gates and their ups, so that it is applied where the sums are. It
takes them in steps of 64 columns, of few rows from both halves in turns: while the matrix units are at one it makes the
next one's operands, and once in a turn of two blocks it waits for all. (Where the units still read registers as a loop
begins anew, the assembler lets them do one thing at a time.) Scales go into operands, which are rounded once, so sums
stay where they are from a tile's first block to its last.

Each processor has one program. Where tiles would leave many processors idle in their last round, the last ones are
shared: all their blocks in a row, dealt out evenly, so that a program begins and ends amid a tile. It takes these
first, from the last to the first: the sums of one that it does not finish are left in a workspace at once, long before
the program that has this tile's last block adds them to its own, in their order, so a result does not depend on who
came when. Who waits, waits for programs that were launched before it. Then come whole tiles.

Results leave through shared memory and the copy engine, but those in float32, which logits are: they go to memory from
where they are, eight lines in a row of `out`, so that this may be of any width and lie anywhere.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.attention.triton.decode import LOG2_E
from quire.kernels.gemm.codes import BLOCK, HALF, NIBBLES, Codes
from quire.kernels.gemm.triton.batch_gemm import MAX_TILES, _counters
from quire.kernels.gemm.triton.code_plan import COSTS, GATED_COSTS, LINES, Plan, most_rows, num_tiles, plan
from quire.kernels.gemm.triton.code_steps_sm90 import (
    half_of,
    is_bytes,
    known_halves,
    multiply_step,
    scales_of,
    shift_of,
    words_of,
)
from quire.kernels.gemm.triton.codes import KINDS, arguments, by_two, tail_of
from quire.kernels.gemm.triton.parts_sm90 import collected, count, leave
from quire.kernels.gemm.triton.pipeline_sm90 import GROUP_M, SWIZZLED, _asm, ask, halves, hand_over, place, swish
from quire.kernels.triton.launch import has_pdl, num_processors

TURN = 2  # blocks
SHARED_BYTES = 226 * 1024  # of a processor; a program has some more for its barriers
RING_BYTES = 192 * 1024  # of these
MOST_STAGES = 12
MANY = 13  # blocks of 128 lines a processor, from which on tiles for no more than 16 rows pay
FEWEST_ROWS = 9
WORDS_IN_SHARED = gl.NVMMASharedLayout(64, 32, 2)
ALL_COLUMNS = 1 << 20  # where a line has one scale: for any K the same kernel
BYTES_IN_SHARED = gl.NVMMASharedLayout(64, 16, 2)
_built: set[tuple[object, ...]] = set()  # what the kernel was compiled for, of more than 64 rows


@gluon.jit
def _of_lines(ptr, first, lines, LAYOUT: gl.constexpr):
    """[64, 1], float32: a number of each line."""
    line = first + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    return gl.load(ptr + gl.minimum(line, lines - 1)).to(gl.float32)[:, None]


@gluon.jit
def _store(y, out_ptr, out_stride, first_m, first_n, M, N):
    """Results [64 lines, rows] to out [M, N], as far as it goes; 16 rows at a time, for whose addresses there are
    registers."""
    ROWS: gl.constexpr = y.shape[1]
    if ROWS > 16:
        a, b = halves(y)
        _store(a, out_ptr, out_stride, first_m, first_n, M, N)
        _store(b, out_ptr, out_stride, first_m + ROWS // 2, first_n, M, N)
    else:
        line = first_n + gl.arange(0, 64, gl.SliceLayout(1, y.type.layout))[:, None]
        row = first_m + gl.arange(0, ROWS, gl.SliceLayout(0, y.type.layout))[None, :]
        gl.store(out_ptr + row.to(gl.int64) * out_stride + line, y, (line < N) & (row < M))


@gluon.constexpr_function
def _beside(rows, halves, kind, group):
    """Whether both halves' first columns come before their last ones, so that no product follows one in the same sums:
    with few rows that is waited for. Known to pay for integers of 4 bits; more rows take the registers for it."""
    return rows <= 64 and halves == 2 and kind == 0 and group >= 128


@gluon.jit
def _segment(i, parts, begin, end, blocks, whole_tiles):
    """Number i of what a program does: the tile, its first block, and the one behind the last. The first `parts` are of
    shared tiles."""
    shared = (end - 1) // blocks - i
    own = gl.program_id(0) + (i - parts) * gl.num_programs(0)
    is_part = i < parts
    tile = gl.where(is_part, whole_tiles + shared, own)
    first = gl.where(is_part, gl.maximum(begin - shared * blocks, 0), 0)
    last = gl.where(is_part, gl.minimum(end - shared * blocks, blocks), blocks)
    return tile, first, last


@gluon.jit
def _consume(
    out, out_stride, x_tiles, w_tiles, out_tiles, full, empty, loaded, scale_ptr, zero_ptr, outer_ptr, table_ptr,
    bias_ptr, partial_ptr, counter_ptr, M, N, tiles_m, tiles_n, whole_tiles, parts, segments, begin, end, each, blocks,
    groups, tail,
    TAIL: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, OUTER: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr, WIDE: gl.constexpr, HALVES: gl.constexpr,
    TURN: gl.constexpr, GROUP_M: gl.constexpr, LOG2_E: gl.constexpr, PDL: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    RESULTS: gl.constexpr = 1 if GATED else HALVES
    STEP: gl.constexpr = RESULTS * 128
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    like: gl.constexpr = x_tiles.dtype
    SHIFT: gl.constexpr = shift_of(like, KIND, ZERO)
    BESIDE: gl.constexpr = _beside(ROWS, HALVES, KIND, GROUP)
    apart = N if GATED else 128
    lines = 2 * N if GATED else N
    tile, first, last = _segment(0, parts, begin, end, blocks, whole_tiles)
    m, n = place(tile, tiles_m, tiles_n, GROUP_M)
    first_n = n * STEP + NUMBER * 64
    scales = ()
    for half in gl.static_range(HALVES):
        scales += (scales_of(scale_ptr, zero_ptr, first_n + half * apart, lines, groups, first, KIND, GROUP, ZERO),)
    if PDL:
        _asm("griddepcontrol.wait; // $0")
    stage = 0
    parity = 0
    before = 0
    turn = 0
    for i in range(segments):
        tile, first, last = _segment(i, parts, begin, end, blocks, whole_tiles)
        m, n = place(tile, tiles_m, tiles_n, GROUP_M)
        first_n = n * STEP + NUMBER * 64
        after = gl.minimum(i + 1, segments - 1)
        tile_after, first_after, _last_after = _segment(after, parts, begin, end, blocks, whole_tiles)
        _m_after, n_after = place(tile_after, tiles_m, tiles_n, GROUP_M)
        following = n_after * STEP + NUMBER * 64
        sums = ()
        for _ in gl.static_range(HALVES):
            sums += (gl.zeros([64, ROWS], gl.float32, SUMS),)
        if not WIDE:
            tma.store_wait(0)
            gl.thread_barrier()  # the tile before this one has left its places
        if RESIDUAL:  # noqa: SIM102 (known when this is compiled)
            if last == blocks:
                for half in gl.static_range(RESULTS):
                    at = RESULTS * NUMBER + half
                    ask(out, out_tiles.index(at), loaded.index(at), m * ROWS, first_n + half * 128)
        for block in range(first, last, TURN):
            for j in gl.static_range(TURN):
                is_end = block + j + 1 == last
                next_line = gl.where(is_end, following, first_n)
                next_block = gl.where(is_end, first_after, block + j + 1)
                is_last = block + j == tail
                mbarrier.wait(full.index(stage), parity)
                x_early = x_tiles.index(2 * stage).permute([1, 0])
                x_late = x_tiles.index(2 * stage + 1).permute([1, 0])
                words = words_of(w_tiles, stage, is_last, 0, HALVES, NUMBER, KIND, TAIL)
                if BESIDE:
                    other = words_of(w_tiles, stage, is_last, 1, HALVES, NUMBER, KIND, TAIL)
                    known = known_halves(scales[0][0], scales[0][1], like, KIND, ZERO)
                    known_other = known_halves(scales[1][0], scales[1][1], like, KIND, ZERO)
                    for late in gl.static_range(2):
                        x_tile = x_tiles.index(2 * stage + late).permute([1, 0])
                        codes = half_of(words, w_tiles, stage, 0, HALVES, late, NUMBER, KIND)
                        a = multiply_step(codes, known[late], x_tile, sums[0], table_ptr, KIND, ZERO, LEFT)
                        codes = half_of(other, w_tiles, stage, 1, HALVES, late, NUMBER, KIND)
                        b = multiply_step(codes, known_other[late], x_tile, sums[1], table_ptr, KIND, ZERO, LEFT)
                        sums = (a, b)
                        if j > 0 and late == 0:
                            mbarrier.arrive(empty.index(before), count=1)
                    scales = ()
                    for half in gl.static_range(HALVES):
                        line = next_line + half * apart
                        scales += (scales_of(scale_ptr, zero_ptr, line, lines, groups, next_block, KIND, GROUP, ZERO),)
                else:
                    for half in gl.static_range(HALVES):
                        known, known_late = known_halves(scales[0][0], scales[0][1], like, KIND, ZERO)
                        early = half_of(words, w_tiles, stage, half, HALVES, 0, NUMBER, KIND)
                        acc = multiply_step(early, known, x_early, sums[0], table_ptr, KIND, ZERO, LEFT)
                        late = half_of(words, w_tiles, stage, half, HALVES, 1, NUMBER, KIND)
                        if half + 1 < HALVES:
                            words = words_of(w_tiles, stage, is_last, half + 1, HALVES, NUMBER, KIND, TAIL)
                        acc = multiply_step(late, known_late, x_late, acc, table_ptr, KIND, ZERO, LEFT)
                        if j > 0 and half == 0:
                            mbarrier.arrive(empty.index(before), count=1)
                        coming = scales_of(
                            scale_ptr, zero_ptr, next_line + half * apart, lines, groups, next_block, KIND, GROUP, ZERO
                        )  # fmt: skip
                        sums, scales = sums[1:], scales[1:]
                        sums += (acc,)
                        scales += (coming,)
                before = stage
                stage += 1
                if stage == STAGES:
                    stage = 0
                    parity ^= 1
            if HALVES == 2:
                a, b = warpgroup_mma_wait(0, deps=[sums[0], sums[1]])
                sums = (a, b)
            else:
                sums = (warpgroup_mma_wait(0, deps=[sums[0]]),)
            mbarrier.arrive(empty.index(before), count=1)
        if last < blocks:
            shared = tile - whole_tiles
            leave(sums, partial_ptr, NUMBER)
            count(counter_ptr + 2 * shared + NUMBER, ((shared + 1) * blocks - 1) // each - shared * blocks // each)
        else:
            if first > 0:
                shared = tile - whole_tiles
                counter = counter_ptr + 2 * shared + NUMBER
                sums = collected(sums, partial_ptr, counter, shared * blocks // each, ROWS, NUMBER)
            results = ()
            for half in gl.static_range(HALVES):
                y = sums[half] * SHIFT
                if OUTER:
                    y *= _of_lines(outer_ptr, first_n + half * apart, lines, SUMS)
                if BIAS:
                    y += _of_lines(bias_ptr, first_n + half * apart, lines, SUMS)
                results += (y,)
            if GATED:
                results = (swish(results[0], results[1], LOG2_E),)
            for half in gl.static_range(RESULTS):
                if WIDE:
                    _store(results[half], out, out_stride, m * ROWS, first_n + half * 128, M, N)
                else:
                    at = RESULTS * NUMBER + half
                    hand_over(
                        results[half], out, out_tiles.index(at), loaded.index(at), turn, m * ROWS,
                        first_n + half * 128, RESIDUAL,
                    )  # fmt: skip
            turn ^= 1
    if not WIDE:
        tma.store_wait(0)


@gluon.jit
def _send_codes(w_desc, w_tiles, full, stage, line, block, apart, HALVES: gl.constexpr):
    STAGES: gl.constexpr = full.shape[0]
    WIDTH: gl.constexpr = w_tiles.shape[2]
    TIMES: gl.constexpr = w_tiles.shape[0] // (2 * HALVES * STAGES)  # tiles of a block's 128 columns
    halves = w_tiles._reinterpret(w_tiles.dtype, [HALVES * TIMES * STAGES, 128, WIDTH], w_tiles.type.layout)
    for i in gl.static_range(HALVES * TIMES):
        at = [line + i // TIMES * apart, (block * TIMES + i % TIMES) * WIDTH]
        tma.async_copy_global_to_shared(w_desc, at, full.index(stage), halves.index(HALVES * TIMES * stage + i))


@gluon.jit
def _produce(
    x_desc, w_desc, x_tiles, w_tiles, full, empty, N, tiles_m, tiles_n, whole_tiles, parts, segments, begin, end,
    blocks,
    GATED: gl.constexpr, HALVES: gl.constexpr, GROUP_M: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """No kernel before this one writes the weight: of that the ring's fill is asked for before those have ended."""
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    BYTES: gl.constexpr = ROWS * 256 + w_tiles.shape[0] // STAGES * 64 * 64
    STEP: gl.constexpr = 128 if GATED else HALVES * 128
    apart = N if GATED else 128
    tile, first, last = _segment(0, parts, begin, end, blocks, whole_tiles)
    m, n = place(tile, tiles_m, tiles_n, GROUP_M)
    early = gl.minimum(last - first, STAGES)
    for stage in range(early):
        mbarrier.expect(full.index(stage), BYTES)
        _send_codes(w_desc, w_tiles, full, stage, n * STEP, first + stage, apart, HALVES)
    if PDL:
        _asm("griddepcontrol.wait; // $0")
    stage = 0
    parity = 1
    for i in range(segments):
        tile, first, last = _segment(i, parts, begin, end, blocks, whole_tiles)
        m, n = place(tile, tiles_m, tiles_n, GROUP_M)
        for block in range(first, last):
            if early == 0:
                mbarrier.wait(empty.index(stage), parity)
                mbarrier.expect(full.index(stage), BYTES)
                _send_codes(w_desc, w_tiles, full, stage, n * STEP, block, apart, HALVES)
            else:
                early -= 1
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_desc, [m * ROWS, block * 128 + half * 64], full.index(stage), x_tiles.index(2 * stage + half)
                )  # fmt: skip
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1


@gluon.jit(
    do_not_specialize=["M", "N", "out_stride", "waves", "each", "blocks", "groups", "tail"],
    do_not_specialize_on_alignment=["out"],
)
def _code_gemm_kernel(
    x_desc, w_desc, out, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, partial_ptr, counter_ptr,
    M, N, out_stride, waves, each, blocks, groups, tail,
    TAIL: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr,
    OUTER: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr, WIDE: gl.constexpr,
    HALVES: gl.constexpr, TURN: gl.constexpr, GROUP_M: gl.constexpr, LOG2_E: gl.constexpr, PDL: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out: a descriptor, or of WIDE results a pointer, float32, to rows that lie `out_stride` apart."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    RESULTS: gl.constexpr = 1 if GATED else HALVES
    TIMES: gl.constexpr = 2 if is_bytes(KIND) else 1
    tiles_m = (M + ROWS - 1) // ROWS
    tiles_n = (N + RESULTS * 128 - 1) // (RESULTS * 128)
    whole_tiles = gl.minimum(waves * gl.num_programs(0), tiles_m * tiles_n)
    begin = gl.program_id(0) * each
    end = gl.minimum(begin + each, (tiles_m * tiles_n - whole_tiles) * blocks)
    parts = gl.where(end > begin, (end - 1) // blocks - begin // blocks + 1, 0)
    own = (whole_tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    segments = parts + gl.maximum(own, 0)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, 64], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(
        w_desc.dtype, [2 * HALVES * TIMES * STAGES, 64, w_desc.block_type.shape[1]], w_desc.layout
    )
    if WIDE:
        out_tiles = x_tiles  # not used
    else:
        out_tiles = gl.allocate_shared_memory(x_desc.dtype, [2 * RESULTS, ROWS, 64], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [2 * RESULTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * RESULTS):
        mbarrier.init(loaded.index(i), count=1)
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
                out, out_stride, x_tiles, w_tiles, out_tiles, full, empty, loaded, scale_ptr, zero_ptr, outer_ptr,
                table_ptr, bias_ptr, partial_ptr, counter_ptr, M, N, tiles_m, tiles_n, whole_tiles, parts, segments,
                begin, end, each, blocks, groups, tail, TAIL, KIND, GROUP, ZERO, OUTER, BIAS, GATED, RESIDUAL, WIDE,
                HALVES, TURN, GROUP_M, LOG2_E, PDL, FIRST,
            )),
            (_consume, (
                out, out_stride, x_tiles, w_tiles, out_tiles, full, empty, loaded, scale_ptr, zero_ptr, outer_ptr,
                table_ptr, bias_ptr, partial_ptr, counter_ptr, M, N, tiles_m, tiles_n, whole_tiles, parts, segments,
                begin, end, each, blocks, groups, tail, TAIL, KIND, GROUP, ZERO, OUTER, BIAS, GATED, RESIDUAL, WIDE,
                HALVES, TURN, GROUP_M, LOG2_E, PDL, SECOND,
            )),
            (_produce, (
                x_desc, w_desc, x_tiles, w_tiles, full, empty, N, tiles_m, tiles_n, whole_tiles, parts, segments, begin,
                end, blocks, GATED, HALVES, GROUP_M, PDL,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],  # theirs; the first consumer gets the rest, as many as the second
    )  # fmt: skip


def _is_plain(x: torch.Tensor, weight: Codes) -> bool:
    """Whether a code becomes an operand in one step."""
    plain = weight.kind == "int4" and weight.group == BLOCK and weight.zero is weight.outer is None
    return plain and x.dtype == torch.bfloat16


def takes(x: torch.Tensor, weight: Codes, gated: bool, out: torch.Tensor | None, *, wide: bool = False) -> bool:
    """Whether `linear` takes these, x [m, k], and results for `out` if that is given: the copy engine can read x and
    the codes, and read and write results; a matrix instruction's columns, or a word's, have one scale; each shared tile
    has a counter; and nothing else is known to be faster. wide: results are float32."""
    (m, k), n = x.shape, len(weight.codes) // (2 if gated else 1)
    plain = _is_plain(x, weight)
    most = most_rows(weight.kind, weight.group, plain=plain)
    if m < FEWEST_ROWS or (most is not None and m > most) or (gated and out is not None):
        return False
    moving = [(x, x.stride(0)), (weight.codes, weight.codes.stride(0))]
    if not wide:
        moving.append((x, n) if out is None else (out, out.stride(0)))
    whole = weight.group >= (32 if weight.kind in NIBBLES else 16) and tail_of(weight) < 3
    moved = x.stride(1) == 1 and all(
        row * one.element_size() % 16 == 0 and one.data_ptr() % 16 == 0 for one, row in moving
    )
    processors = num_processors(x.device)
    how = plan(m, n, k, gated=gated, plain=plain, processors=processors)
    counted = 2 * (num_tiles(m, n, how.rows, how.halves, gated=gated) - how.waves * processors) <= MAX_TILES
    is_much = -(-len(weight.codes) // LINES) * (k // BLOCK) >= MANY * processors
    # Few rows of 4 bits are faster elsewhere where there is little to do, and so are tables with a gate.
    pays = m > 16 or weight.kind not in NIBBLES or (is_much and not (KINDS[weight.kind] == KINDS["nf4"] and gated))
    return whole and moved and counted and pays


def stages(how: Plan, *, gated: bool, nibbles: bool, wide: bool = False) -> int:
    """Of the ring. wide: results are float32, and have no place there."""
    stage = how.rows * BLOCK * 2 + how.halves * LINES * (HALF if nibbles else BLOCK)
    results = 0 if wide else how.rows * LINES * 2 * (1 if gated else how.halves)
    return min(min(RING_BYTES, SHARED_BYTES - results) // stage, MOST_STAGES)


def _described(weight: Codes) -> TensorDescriptor:
    """The codes, 64 bytes of a line at a time."""
    if weight.kind in NIBBLES:
        return TensorDescriptor.from_tensor(weight.codes.view(torch.int32), [LINES, BLOCK // 8], WORDS_IN_SHARED)
    return TensorDescriptor.from_tensor(weight.codes.view(torch.int16), [LINES, HALF // 2], BYTES_IN_SHARED)


def linear(
    x: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None,
    gated: bool,
    residual: bool,
    out: torch.Tensor,
    how: Plan | None = None,
) -> torch.Tensor:
    """x [m, k] that it `takes` → out [m, n], of x's dtype; with `residual` the result is added to what stands there.
    gated: the weight's lines are gates and then ups, the result silu(gate) · up. With neither, out may be float32."""
    (m, k), n = x.shape, out.shape[1]
    if m > 64:  # another number of rows may want other tiles, and nothing is to be compiled in mid-service
        of = (x, by_two(weight), weight.zero, weight.outer, bias, out)
        types = tuple(None if y is None else y.dtype for y in of)
        built = (x.device, weight.kind, weight.group, tail_of(weight), types, gated, residual)
        if built not in _built:
            for rows, halves in GATED_COSTS if gated else COSTS:
                _launch(x, weight, bias, gated, residual, out, Plan(rows, halves, 0), compile_only=True)
            _built.add(built)
    how = how or plan(m, n, k, gated=gated, plain=_is_plain(x, weight), processors=num_processors(x.device))
    _launch(x, weight, bias, gated, residual, out, how)
    return out


def _launch(
    x: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None,
    gated: bool,
    residual: bool,
    out: torch.Tensor,
    how: Plan,
    *,
    compile_only: bool = False,
) -> None:
    (m, k), n = x.shape, out.shape[1]
    processors = num_processors(x.device)
    rows, halves, waves = how
    blocks = -(-k // (TURN * BLOCK)) * TURN  # behind the last column the copy engine reads zeros
    tiles = num_tiles(m, n, rows, halves, gated=gated)
    work = max(tiles - waves * processors, 0) * (blocks // TURN)
    each = -(-work // processors)
    programs = min(tiles, processors) if not work else processors if waves else -(-work // each)
    _, _, zero, outer, table = arguments(weight)
    scale = by_two(weight)
    partial = torch.empty(programs * halves * LINES * rows if work else 1, dtype=torch.float32, device=x.device)
    pdl, wide = has_pdl(x.device), out.dtype == torch.float32
    given = (
        TensorDescriptor.from_tensor(x, [rows, HALF], SWIZZLED), _described(weight),
        out if wide else TensorDescriptor.from_tensor(out, [rows, HALF], SWIZZLED), scale, zero, outer, table,
        x if bias is None else bias, partial, _counters(x.device, torch.cuda.current_stream(x.device).cuda_stream),
        m, n, out.stride(0), waves, each * TURN, blocks, scale.shape[1], k // BLOCK,
    )  # fmt: skip
    options = {
        "TAIL": tail_of(weight), "STAGES": stages(how, gated=gated, nibbles=weight.kind in NIBBLES, wide=wide),
        "KIND": KINDS[weight.kind], "WIDE": wide,
        "GROUP": weight.group if weight.scale.shape[1] > 1 else ALL_COLUMNS, "ZERO": weight.zero is not None,
        "OUTER": weight.outer is not None, "BIAS": bias is not None, "GATED": gated, "RESIDUAL": residual,
        "HALVES": halves, "TURN": TURN, "GROUP_M": GROUP_M, "LOG2_E": LOG2_E, "PDL": pdl, "CONSUMER_REGISTERS": 232,
        "PRODUCER_REGISTERS": 40, "num_warps": 4, "launch_pdl": pdl,
    }  # fmt: skip
    if compile_only:
        _code_gemm_kernel.warmup(*given, grid=(programs,), **options)
    else:
        _code_gemm_kernel[(programs,)](*given, **options)
