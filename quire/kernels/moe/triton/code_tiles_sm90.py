"""Products with experts in codes for choices ordered by expert, for compute capability 9.0, in Gluon: gate and up with
the gate, or down with the weights of the choices.

Tiles come from the device's own table, choices of one expert each, and are multiplied as in `code_gemm_sm90`: the
weight is the tall operand, and its codes become operands in registers. x lies in the order of the choices, so the copy
engine fetches it; for gate and up it is copied into that order first.
"""

from __future__ import annotations

from functools import partial

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.gemm.codes import BLOCK, HALF, NIBBLES, WORD, Codes
from quire.kernels.gemm.triton.code_gemm_sm90 import (
    ALL_COLUMNS,
    BYTES_IN_SHARED,
    MOST_STAGES,
    RING_BYTES,
    TURN,
    WORDS_IN_SHARED,
    _of_lines,
    _send_codes,
)
from quire.kernels.gemm.triton.code_plan import LINES
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
from quire.kernels.gemm.triton.pipeline_sm90 import SWIZZLED, follow
from quire.kernels.moe.inside import Gate
from quire.kernels.moe.tiling import Tiling
from quire.kernels.moe.triton.code_inside import gated, squared
from quire.kernels.moe.triton.plan import HEIGHTS
from quire.kernels.triton.launch import cdiv, has_pdl, num_processors
from quire.kernels.triton.launches import launch

REGISTERS = {1: (232, 40, None), 2: (104, 24, 80)}  # by programs on a processor: a consumer's, a producer's, the mean
_built: set[tuple[object, ...]] = set()  # what the kernel was compiled for


@gluon.jit
def _place(tile, tiles_ptr, most, tiles_n, all_lines, STEP: gl.constexpr):
    """A tile's expert, -1 for none, and the first of its lines among those of all experts."""
    expert = gl.load(tiles_ptr + gl.minimum(tile // tiles_n, most - 1))
    return expert, gl.maximum(expert, 0) * all_lines + tile % tiles_n * STEP


@gluon.jit
def _consume(
    x_tiles, w_tiles, full, empty, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, share_ptr, order_ptr, tiles_ptr,
    out_ptr, N, last, most, tiles_n, blocks, groups, lines,
    TAIL: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, OUTER: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr, SQUARED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    SHIFT: gl.constexpr, HALVES: gl.constexpr, TURN: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    TWICE: gl.constexpr = GATED and not SQUARED
    RESULTS: gl.constexpr = 1 if TWICE else HALVES
    STEP: gl.constexpr = RESULTS * 128
    all_lines = 2 * N if TWICE else N
    apart = N if TWICE else 128
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    like: gl.constexpr = x_tiles.dtype
    BY: gl.constexpr = shift_of(like, KIND, ZERO)
    in_sums = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
    column = gl.arange(0, 64, gl.SliceLayout(0, STORED))
    _expert, first = _place(gl.program_id(0), tiles_ptr, most, tiles_n, all_lines, STEP)
    scales = ()
    for half in gl.static_range(HALVES):
        line = first + NUMBER * 64 + half * apart
        scales += (scales_of(scale_ptr, zero_ptr, line, lines, groups, 0, KIND, GROUP, ZERO),)
    stage = 0
    parity = 0
    before = 0
    for tile in range(gl.program_id(0), most * tiles_n, gl.num_programs(0)):
        expert, first = _place(tile, tiles_ptr, most, tiles_n, all_lines, STEP)
        if expert >= 0:
            first += NUMBER * 64
            _expert_after, following = _place(tile + gl.num_programs(0), tiles_ptr, most, tiles_n, all_lines, STEP)
            following += NUMBER * 64
            sums = ()
            for _ in gl.static_range(HALVES):
                sums += (gl.zeros([64, ROWS], gl.float32, SUMS),)
            for block in range(0, blocks, TURN):
                for j in gl.static_range(TURN):
                    is_end = block + j + 1 == blocks
                    is_last = block + j == last
                    next_line = gl.where(is_end, following, first)
                    next_block = gl.where(is_end, 0, block + j + 1)
                    mbarrier.wait(full.index(stage), parity)
                    x_early = x_tiles.index(2 * stage).permute([1, 0])
                    x_late = x_tiles.index(2 * stage + 1).permute([1, 0])
                    words = words_of(w_tiles, stage, is_last, 0, HALVES, NUMBER, KIND, TAIL)
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
            begin = gl.load(tiles_ptr + most + tile // tiles_n)
            count = gl.load(tiles_ptr + 2 * most + tile // tiles_n)
            results = ()
            for half in gl.static_range(HALVES):
                y = sums[half] * BY
                if OUTER:
                    y *= _of_lines(outer_ptr, first + half * apart, lines, SUMS)
                if BIAS:
                    y += _of_lines(bias_ptr, first + half * apart, lines, SUMS)
                results += (y,)
            if TWICE:
                results = (gated(results[0], results[1], ALPHA, LIMIT, SHIFT),)
            place = begin + row
            if not GATED:
                choice = gl.load(order_ptr + begin + in_sums, in_sums < count, 0)
                share = gl.load(share_ptr + choice, in_sums < count, 0.0)
                place = gl.load(order_ptr + place, row < count, 0)
            for half in gl.static_range(RESULTS):
                y = results[half]
                if SQUARED:
                    y = squared(y)
                if not GATED:
                    y *= share[None, :]
                y = gl.convert_layout(y.to(out_ptr.dtype.element_ty).permute([1, 0]), STORED)
                n = tile % tiles_n * STEP + NUMBER * 64 + half * 128 + column
                out_at = out_ptr + place.to(gl.int64)[:, None] * N + n[None, :]
                gl.store(out_at, y, (row < count)[:, None] & (n < N)[None, :])


@gluon.jit
def _produce(
    x_desc, w_desc, x_tiles, w_tiles, full, empty, tiles_ptr, N, most, tiles_n, blocks,
    GATED: gl.constexpr, SQUARED: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_tiles.shape[1]
    BYTES: gl.constexpr = ROWS * 256 + w_tiles.shape[0] // STAGES * 64 * 64
    TWICE: gl.constexpr = GATED and not SQUARED
    STEP: gl.constexpr = 128 if TWICE else HALVES * 128
    all_lines = 2 * N if TWICE else N
    apart = N if TWICE else 128
    stage = 0
    parity = 1
    for tile in range(gl.program_id(0), most * tiles_n, gl.num_programs(0)):
        expert, first = _place(tile, tiles_ptr, most, tiles_n, all_lines, STEP)
        if expert >= 0:
            begin = gl.load(tiles_ptr + most + tile // tiles_n)
            for block in range(blocks):
                mbarrier.wait(empty.index(stage), parity)
                mbarrier.expect(full.index(stage), BYTES)
                _send_codes(w_desc, w_tiles, full, stage, first, block, apart, HALVES)
                for half in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        x_desc, [begin, block * 128 + half * 64], full.index(stage), x_tiles.index(2 * stage + half)
                    )  # fmt: skip
                stage += 1
                if stage == STAGES:
                    stage = 0
                    parity ^= 1


@gluon.jit(do_not_specialize=["last", "most", "lines", "blocks", "groups"])
def _code_tiles_kernel(
    x_desc, w_desc, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, share_ptr, order_ptr, tiles_ptr, out_ptr,
    N, last, most, lines, blocks, groups,
    TAIL: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    ZERO: gl.constexpr, OUTER: gl.constexpr, BIAS: gl.constexpr, GATED: gl.constexpr, SQUARED: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, SHIFT: gl.constexpr, HALVES: gl.constexpr, TURN: gl.constexpr,
    PDL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """GATED: gate and up, or up alone, SQUARED; results are in the order of the choices. Else down: each result is
    where its choice is, times its share."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    TIMES: gl.constexpr = 2 if is_bytes(KIND) else 1
    STEP: gl.constexpr = 128 if GATED and not SQUARED else HALVES * 128
    tiles_n = (N + STEP - 1) // STEP
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS, 64], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(
        w_desc.dtype, [2 * HALVES * TIMES * STAGES, 64, w_desc.block_type.shape[1]], w_desc.layout
    )
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
                x_tiles, w_tiles, full, empty, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, share_ptr,
                order_ptr, tiles_ptr, out_ptr, N, last, most, tiles_n, blocks, groups, lines, TAIL, KIND, GROUP, ZERO,
                OUTER, BIAS, GATED, SQUARED, ALPHA, LIMIT, SHIFT, HALVES, TURN, FIRST,
            )),
            (_consume, (
                x_tiles, w_tiles, full, empty, scale_ptr, zero_ptr, outer_ptr, table_ptr, bias_ptr, share_ptr,
                order_ptr, tiles_ptr, out_ptr, N, last, most, tiles_n, blocks, groups, lines, TAIL, KIND, GROUP, ZERO,
                OUTER, BIAS, GATED, SQUARED, ALPHA, LIMIT, SHIFT, HALVES, TURN, SECOND,
            )),
            (_produce, (
                x_desc, w_desc, x_tiles, w_tiles, full, empty, tiles_ptr, N, most, tiles_n, blocks, GATED, SQUARED,
                HALVES,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],  # theirs; the first consumer gets the rest, as many as the second
    )  # fmt: skip


def takes(weight: Codes) -> bool:
    """Whether `product` is made for weight [experts, n, k]: the copy engine can read x and the codes, and a matrix
    instruction's columns, or a word's, have one scale."""
    k, nibbles = weight.columns, weight.kind in NIBBLES
    group = BLOCK if weight.scale.shape[2] == 1 else weight.group
    whole = k % (WORD if nibbles else 16) == 0 and (BLOCK % group == 0 or group % BLOCK == 0) and tail_of(weight) < 3
    return whole and group >= (WORD if nibbles else 16) and weight.codes.is_contiguous()


def programs(weight: Codes, rows: int) -> int:
    """On a processor: two, each with half the ring, where decoding takes longer than memory and registers allow it, so
    that more warps share the work. (Of rows of whole blocks the assembler then has products wait for one another; two
    programs are faster all the same.)"""
    return 2 if rows <= 32 and weight.kind in ("int4", "e2m1") and weight.zero is None else 1


def stages(rows: int, halves: int, *, nibbles: bool, programs: int = 1) -> int:
    """Of the ring."""
    return min(
        RING_BYTES // programs // (rows * BLOCK * 2 + halves * LINES * (HALF if nibbles else BLOCK)), MOST_STAGES
    )


def _described(weight: Codes) -> TensorDescriptor:
    lines = weight.codes.flatten(0, 1)
    if weight.kind in NIBBLES:
        return TensorDescriptor.from_tensor(lines.view(torch.int32), [LINES, BLOCK // 8], WORDS_IN_SHARED)
    return TensorDescriptor.from_tensor(lines.view(torch.int16), [LINES, HALF // 2], BYTES_IN_SHARED)


def product(
    x: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None,
    share: torch.Tensor | None,
    out: torch.Tensor,
    tiling: Tiling,
    gate: Gate | None,
    *,
    compile_only: bool = False,
) -> torch.Tensor:
    """x [choices, k] in the order of `tiling` → out [choices, n]: with a gate in that order, behind the gate; else each
    where its choice is, times its share, float32 [choices]. weight: of all experts, that it `takes`."""
    experts, lines, _ = weight.codes.shape
    k, twice = weight.columns, gate is not None and not gate.squared
    n, of = lines // 2 if twice else lines, gate or Gate()
    rows, most = tiling.rows, tiling.tiles.shape[1]
    halves = 2 if twice or rows == 128 else 1
    step = LINES if twice else LINES * halves
    _, _, zero, outer, table = arguments(weight)
    scale, on_one = by_two(weight), programs(weight, rows)
    pdl, nibbles = has_pdl(x.device), weight.kind in NIBBLES
    consumer, producer, mean = REGISTERS[on_one]
    grid = (min(most * cdiv(n, step), on_one * num_processors(x.device)),)
    run = partial(_code_tiles_kernel.warmup, grid=grid) if compile_only else partial(launch, _code_tiles_kernel, grid)
    run(
        TensorDescriptor.from_tensor(x, [rows, HALF], SWIZZLED), _described(weight), scale, zero, outer, table,
        x if bias is None else bias, scale if share is None else share, tiling.order, tiling.tiles, out, n,
        k // BLOCK, most, experts * lines, -(-k // (TURN * BLOCK)) * TURN, scale.shape[2], TAIL=tail_of(weight),
        STAGES=stages(rows, halves, nibbles=nibbles, programs=on_one), KIND=KINDS[weight.kind],
        GROUP=weight.group if weight.scale.shape[2] > 1 else ALL_COLUMNS, ZERO=weight.zero is not None,
        OUTER=weight.outer is not None, BIAS=bias is not None, GATED=gate is not None, SQUARED=of.squared,
        ALPHA=of.alpha, LIMIT=of.limit, SHIFT=of.shift, HALVES=halves, TURN=TURN, PDL=pdl, CONSUMER_REGISTERS=consumer,
        PRODUCER_REGISTERS=producer, num_warps=4, maxnreg=mean, launch_pdl=pdl,
    )  # fmt: skip
    return out


def compile_once(
    x: torch.Tensor,
    weight: Codes,
    bias: torch.Tensor | None,
    share: torch.Tensor | None,
    out: torch.Tensor,
    tiling: Tiling,
    gate: Gate | None,
) -> None:
    """All that any number of tokens will need: nothing is compiled in mid-service."""
    of = (x, by_two(weight), weight.zero, weight.outer, bias)
    types = tuple(None if y is None else y.dtype for y in of)
    n = out.shape[1]
    kind = (x.device, weight.kind, weight.group, n % 16 == 0, tail_of(weight), types, gate)
    if kind in _built:
        return
    _built.add(kind)
    for rows in HEIGHTS:
        product(x, weight, bias, share, out, tiling._replace(rows=rows), gate, compile_only=True)
