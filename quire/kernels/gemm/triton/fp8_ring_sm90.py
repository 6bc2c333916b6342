"""x @ (weight · scale).T for up to 16 rows and a weight of 8-bit floats or integers, with norm, gate and residual sum,
for compute capability 9.0, in Gluon.

A program stays on its processor and works through units: 16 lines of the weight, or 8 gates and their ups. Its
producer, one warp, has the bulk copy engine bring these in steps of 1,024 columns through a ring in shared memory, from
its start on: no kernel of a step writes the weight. Only so many steps are on their way at a time as memory's rate
takes, so that what others ask for does not stand in line behind them. The consumers, eight warps, share a step's
columns; the weight is the tall operand of the matrix units.

x stays in shared memory, so that it is read once a program and not once a unit. Where rows are too long for that, K is
shared out to programs, and the one of a group that comes last adds up what they have left in a workspace.

One row is kept in float16, normed, and the weight becomes that too, exactly. In bfloat16 the row may be larger: a power
of two brings its largest number to where float16 ends. Of more rows that would take reading them twice. They keep their
type, normed by a kernel before, and the weight's bits are moved to where that type has its sign and the last of its
exponent, which are its numbers times a power of two: that is made up for in the sums, and x in bfloat16 is brought half
the way.

Scales are of lines, or of each 128 columns of a line: these are what one consumer's warp has of a step, whose sums are
scaled before they are added to those of others.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gemm.triton.batch_gemm import _counters
from quire.kernels.gemm.triton.plan import RING_COLUMNS, Ring
from quire.kernels.gemm.triton.skinny_registers import _mma, _results
from quire.kernels.triton.launch import cdiv, has_pdl, num_processors

WORDS_IN_SHARED = gl.NVMMASharedLayout(128, 32, 3)
OPTIONS = {"PRODUCER_REGISTERS": 24, "num_warps": 8}


@gluon.constexpr_function
def _word_layout(warps):
    """Of words [2, 8 lines, 32 warps]: a thread has 8 in a row, in banks that no thread beside it reads."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0]],
        lane_bases=[[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 0, 32 << i] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[2, 8, 32 * warps],
    )


@gluon.constexpr_function
def _x_layout(warps, rows):
    """Of x [rows, 128 warps] as it is kept: a thread's 32 neighbours come by eights, four threads' in a row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], *([[8, 0]] if rows == 16 else [])],
        lane_bases=[[0, 8], [0, 16], *([[1, 0], [2, 0], [4, 0]] if rows > 1 else [[0, 0]] * 3)],
        warp_bases=[[0, 128 << i] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[rows, 128 * warps],
    )


@gluon.constexpr_function
def _flat_layout(warps, rows):
    return gl.BlockedLayout([1, 8], [1, 32], [1, warps] if rows == 1 else [warps, 1], [1, 0])


@gluon.constexpr_function
def _moved(is_half):
    """A word's bytes 0 to 3 with their bits where a float has them."""
    right, left, mask = (1, 7, 0x3F803F80) if is_half else (4, 4, 0x07F007F0)
    return (
        "{ .reg .b32 w, y; "
        f"shr.b32 w, $4, {right}; and.b32 w, w, {mask:#x}; lop3.b32 y, $4, 0x80008000, w, 0xea; mov.b32 {{$1, $3}}, y; "
        f"shl.b32 w, $4, {left}; and.b32 w, w, {mask:#x}; "
        "shl.b32 y, $4, 8; lop3.b32 y, y, 0x80008000, w, 0xea; mov.b32 {$0, $2}, y; }"
    )


@gluon.constexpr_function
def _converted():
    """A word's bytes 0 to 3 in float16."""
    return (
        "{ .reg .b16 l, h; .reg .b32 y; mov.b32 {l, h}, $4; "
        "cvt.rn.f16x2.e4m3x2 y, l; mov.b32 {$0, $1}, y; cvt.rn.f16x2.e4m3x2 y, h; mov.b32 {$2, $3}, y; }"
    )


@gluon.constexpr_function
def _integers(is_half, one):
    """A word's integers 0 to 3, 128 more without a sign: in float16 behind the bits of 1024; in bfloat16 as many of its
    least steps, times 2^101. The 128 are taken off then. `one`: neighbours make a pair, else every other."""
    text = "{ .reg .b32 w, y; xor.b32 w, $4, 0x80808080; "
    for pair in range(2):
        if one:
            text += f"prmt.b32 y, w, 0x64646464, {0x4342 if pair else 0x4140:#x}; "
        elif is_half:
            text += "shr.b32 w, w, 8; " if pair else ""
            text += "lop3.b32 y, w, 0x00FF00FF, 0x64006400, 0xea; "
        else:
            text += "shr.b32 w, w, 8; " if pair else ""
            text += "and.b32 y, w, 0x00FF00FF; "
        text += "add.rn.f16x2 y, y, t; " if is_half else "fma.rn.bf16x2 y, y, by, t; "
        first, second = (2 * pair, 2 * pair + 1) if one else (pair, pair + 2)
        text += f"mov.b32 {{${first}, ${second}}}, y; "
    known = "mov.b32 t, 0xE480E480; " if is_half else "mov.b32 t, 0xB300B300; mov.b32 by, 0x72007200; "
    return text.replace("w, y; ", "w, y, t, by; " + known, 1) + "}"


@gluon.constexpr_function
def _four(dtype):
    return (dtype,) * 4


@gluon.jit
def _operands(words, like: gl.constexpr, ONE: gl.constexpr, INTEGERS: gl.constexpr, LAYOUT: gl.constexpr):
    """words [2, 8, 32 warps] → their numbers [warps, 16, 64] twice: two sums are twice as many products under way.

    The order of K is free: of moved bits every other number makes a pair."""
    W: gl.constexpr = words.shape[2] // 32
    HALF: gl.constexpr = like == gl.float16
    FLOATS: gl.constexpr = _converted() if ONE else _moved(HALF)
    TEXT: gl.constexpr = _integers(HALF, ONE) if INTEGERS else FLOATS
    words = words.reshape([16, W, 32]).permute([1, 0, 2])
    a, b, c, d = gl.inline_asm_elementwise(TEXT, "=h,=h,=h,=h,r", [words], dtype=_four(like), is_pure=True, pack=1)
    if ONE:
        y = gl.join(gl.join(a, b), gl.join(c, d))  # [..., second of a pair, second pair]
    else:
        y = gl.join(gl.join(a, c), gl.join(b, d))
    y = y.reshape([W, 16, 4, 2, 4, 2, 2]).permute([0, 1, 4, 6, 2, 5, 3]).reshape([W, 16, 64, 2])
    early, late = y.split()
    return gl.convert_layout(early, LAYOUT, assert_trivial=True), gl.convert_layout(late, LAYOUT, assert_trivial=True)


@gluon.jit
def _x_operands(kept, LAYOUT: gl.constexpr):
    """What is kept of a step, [rows, 128 warps] → [warps, 64, columns] twice; one row is in all columns."""
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = kept.shape[0]
    x = kept.load(_x_layout(W, ROWS)).reshape([ROWS, W, 2, 2, 4, 2, 2, 2]).permute([1, 3, 5, 6, 4, 7, 0, 2])
    if ROWS == 1:
        early, late = x.reshape([W, 64, 2]).split()
        like = gl.zeros([W, 64, 8], x.dtype, LAYOUT)
        early = gl.convert_layout(early, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
        late = gl.convert_layout(late, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
        early, late = gl.broadcast(early[:, :, None], like)[0], gl.broadcast(late[:, :, None], like)[0]
    else:
        early, late = x.reshape([W, 64, ROWS, 2]).split()
        early = gl.convert_layout(early, LAYOUT, assert_trivial=True)
        late = gl.convert_layout(late, LAYOUT, assert_trivial=True)
    return early, late


@gluon.jit
def _keep_rows(x_ptr, kept, M, begin, x_stride, K: gl.constexpr, INTEGERS: gl.constexpr):
    """x from column `begin` on to `kept` [steps, rows, columns], zeros behind it; returns the factors that are left to
    the sums, of each row."""
    STEPS: gl.constexpr = kept.shape[0]
    ROWS: gl.constexpr = kept.shape[1]
    WIDTH: gl.constexpr = kept.shape[2]
    FLAT: gl.constexpr = _flat_layout(gl.num_warps(), ROWS)
    HALF: gl.constexpr = kept.dtype == gl.float16
    POWER: gl.constexpr = 1.0 if HALF or INTEGERS else 2.0**60
    BACK: gl.constexpr = (1.0 if HALF else 2.0**32) if INTEGERS else (2.0**8 if HALF else 2.0**60)
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, FLAT))[None, :]
    m = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))[:, None]
    for i in gl.static_range(STEPS):
        at = begin + i * WIDTH + k
        x = gl.load(x_ptr + m * x_stride + at, (m < M) & (at < K), 0.0)
        x = (x.to(gl.float32) * POWER).to(x.dtype)
        y = x.reshape([ROWS, WIDTH // 128, 4, 4, 2, 2, 2]).permute([0, 1, 3, 2, 4, 6, 5])
        kept.index(i).store(y.reshape([ROWS, WIDTH]))
    return gl.full([ROWS], BACK, gl.float32, gl.SliceLayout(1, FLAT))


@gluon.jit
def _keep_row(x_ptr, gain_ptr, kept, eps, K: gl.constexpr, NORM: gl.constexpr):
    """The same of one row and its norm, in float16."""
    STEPS: gl.constexpr = kept.shape[0]
    WIDTH: gl.constexpr = kept.shape[2]
    FLAT: gl.constexpr = _flat_layout(gl.num_warps(), 1)
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, FLAT))[None, :]
    xs = ()
    for i in gl.static_range(STEPS):
        xs += (gl.load(x_ptr + i * WIDTH + k, i * WIDTH + k < K, 0.0),)
    gains = ()
    if NORM:
        for i in gl.static_range(STEPS):
            gains += (gl.load(gain_ptr + i * WIDTH + k, i * WIDTH + k < K, 0.0),)
    squares = gl.zeros([1, WIDTH], gl.float32, FLAT)
    largest = gl.zeros([1, WIDTH], gl.float32, FLAT)
    for i in gl.static_range(STEPS):
        x = xs[i].to(gl.float32)
        if NORM:
            squares += x * x
            x = x * gains[i].to(gl.float32)
        largest = gl.maximum(largest, gl.abs(x))
    # The largest number's exponent becomes 14: float16 has no larger ones but one, and enough of smaller ones.
    power = gl.minimum(268 - (gl.max(largest, axis=1).to(gl.int32, bitcast=True) >> 23), 240)
    up = (power << 23).to(gl.float32, bitcast=True)[:, None]
    factor = ((254 - power) << 23).to(gl.float32, bitcast=True)
    if NORM:
        factor *= gl.rsqrt(gl.sum(squares, axis=1) / K + eps)
    for i in gl.static_range(STEPS):
        x = xs[i].to(gl.float32)
        if NORM:
            x = x * gains[i].to(gl.float32)
        y = (x * up).to(gl.float16).reshape([1, WIDTH // 128, 4, 4, 8]).permute([0, 1, 3, 2, 4])
        kept.index(i).store(y.reshape([1, WIDTH]))
    return factor


@gluon.jit
def _in_columns(factor, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """[rows] → [1, columns], of one row in all."""
    if factor.shape[0] == 1:
        y = gl.full([1, COLUMNS], 1.0, gl.float32, LAYOUT) * gl.sum(factor, axis=0)
    else:
        y = gl.convert_layout(factor, gl.SliceLayout(0, LAYOUT))[None, :]
    return y


@gluon.jit
def _produce(
    w_desc, ring, full, empty, begin, group, groups, own,
    STEPS: gl.constexpr, FLIGHT: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Sends for each step of each unit: twice 8 lines, neighbours, or gates and their ups."""
    STAGES: gl.constexpr = full.shape[0]
    WIDTH: gl.constexpr = ring.shape[3]
    stage = 0
    parity = 1
    count = 0
    landing = 0
    landing_parity = 0
    for i in range(own):
        unit = group + i * groups
        for step in range(STEPS):
            mbarrier.wait(empty.index(stage), parity)
            if FLIGHT < STAGES:
                mbarrier.wait(full.index(landing), landing_parity, pred=count >= FLIGHT)
                if count >= FLIGHT:
                    landing += 1
                    if landing == STAGES:
                        landing = 0
                        landing_parity ^= 1
                count += 1
            mbarrier.expect(full.index(stage), 2 * 8 * WIDTH * 4)
            column = begin + step * WIDTH
            at = [0, unit * 8, column] if GATED else [unit * 2, 0, column]
            tma.async_copy_global_to_shared(w_desc, at, full.index(stage), ring.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1


@gluon.jit
def _add_up(
    partial_ptr, bias_ptr, out_ptr, M, N, out_stride, group, groups, own, most,
    SPLIT: gl.constexpr, COLUMNS: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """What a group's programs have left of its units, in the order of their shares."""
    BLOCK: gl.constexpr = 128 * gl.num_warps()
    UNIT: gl.constexpr = 16 * COLUMNS
    at = gl.arange(0, BLOCK, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    for start in range(0, own * UNIT, BLOCK):
        here = start + at
        total = gl.zeros_like(here).to(gl.float32)
        for share in gl.static_range(SPLIT):
            # Not through the L1 cache: other processors wrote this a moment ago.
            first = (group * SPLIT + share) * most * UNIT
            total += gl.load(partial_ptr + first + here, here < own * UNIT, 0.0, cache_modifier=".cg")
        line = (group + here // UNIT * groups) * 16 + here % 16
        row = here // 16 % COLUMNS
        there = (here < own * UNIT) & (line < N) & (row < M)
        if BIAS:
            total += gl.load(bias_ptr + line, there, 0.0).to(gl.float32)
        out_at = out_ptr + row * out_stride + line
        if RESIDUAL:
            total += gl.load(out_at, there, 0.0).to(gl.float32)
        gl.store(out_at, total.to(out_at.dtype.element_ty), there)


@gluon.jit
def of_lines(ptr, unit, block, N, blocks, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """Scales, or whatever else lines have of their `blocks`: of a unit's lines, for the blocks from `block` on that
    warps have [warps, 16]; 0 behind a line's last."""
    line = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    own = block + gl.arange(0, gl.num_warps(), gl.SliceLayout(1, LAYOUT))[:, None]
    if GATED:
        n = unit * 8 + line % 8
        line = n + line // 8 * N
    else:
        n = unit * 16 + line
        line = n
    return gl.load(ptr + line * blocks + own, (n < N) & (own < blocks), 0.0)


@gluon.jit
def _consume(
    x_ptr, scale_ptr, bias_ptr, gain_ptr, out_ptr, partial_ptr, counter_ptr, ring, kept, parts, full, empty,
    M, N, x_stride, out_stride, blocks, eps, begin, group, groups, share, own, most,
    K: gl.constexpr, SPLIT: gl.constexpr, STEPS: gl.constexpr, INTEGERS: gl.constexpr, BLOCKS: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, EARLY: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = gl.num_warps()
    STAGES: gl.constexpr = full.shape[0]
    OUTPUTS: gl.constexpr = 8 if GATED else 16
    COLUMNS: gl.constexpr = parts.shape[2]
    ONE: gl.constexpr = kept.shape[1] == 1
    MMA: gl.constexpr = _mma(W)
    LINES: gl.constexpr = gl.SliceLayout(2, MMA)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    WORDS: gl.constexpr = _word_layout(W)
    LAYOUT: gl.constexpr = _results(W, OUTPUTS)
    RESULT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    if BLOCKS:  # no kernel of a step writes them; they are asked for two steps ahead
        times = of_lines(scale_ptr, group, share * STEPS * W, N, blocks, GATED, LINES)
        coming = of_lines(
            scale_ptr, group + 1 // STEPS * groups, (share * STEPS + 1 % STEPS) * W, N, blocks, GATED, LINES
        )  # fmt: skip
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    if ONE:
        left = _keep_row(x_ptr, gain_ptr, kept, eps, K, NORM)
    else:
        left = _keep_rows(x_ptr, kept, M, 4 * begin, x_stride, K, INTEGERS)
    factor = _in_columns(left, COLUMNS, RESULT)
    gl.thread_barrier()
    output = gl.arange(0, OUTPUTS, gl.SliceLayout(1, RESULT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, RESULT))
    stage = 0
    parity = 0
    before = 0
    for i in range(own):
        n = (group + i * groups) * OUTPUTS + output
        scale = gl.full([OUTPUTS], 1.0, gl.float32, gl.SliceLayout(1, RESULT))
        up_scale = scale
        if not BLOCKS:
            scale = gl.load(scale_ptr + n, n < N, 0.0).to(gl.float32)
            if GATED:
                up_scale = gl.load(scale_ptr + N + n, n < N, 0.0).to(gl.float32)
        in_out = (n < N)[:, None] & (column < M)[None, :]
        out_at = out_ptr + column[None, :] * out_stride + n[:, None]
        residual = 0.0
        if RESIDUAL and SPLIT == 1:
            residual = gl.load(out_at, in_out, 0.0).to(gl.float32)
        acc = gl.zeros([W, 16, COLUMNS], gl.float32, MMA)
        other = gl.zeros([W, 16, COLUMNS], gl.float32, MMA)
        for step in range(STEPS):
            if BLOCKS:
                after = i * STEPS + step + 2
                unit = group + after // STEPS * groups
                later = of_lines(scale_ptr, unit, (share * STEPS + after % STEPS) * W, N, blocks, GATED, LINES)
            mbarrier.wait(full.index(stage), parity)
            words = ring.index(stage).load(WORDS)
            x, x_late = _x_operands(kept.index(step), RIGHT)
            # The step before, which has been computed with. Loads of this one may be under way still when all threads
            # have met, and what the copy engine writes is in no order with them.
            mbarrier.arrive(empty.index(before), count=1, pred=i * STEPS + step > 0)
            if PDL and not EARLY:  # noqa: SIM102 (constants)
                if (own - i) * STEPS - step <= STAGES:  # what is left has its place in the ring
                    gdc_launch_dependents()
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
            early, late = _operands(words, kept.dtype, ONE, INTEGERS, LEFT)
            if BLOCKS:
                nothing = gl.zeros([W, 16, COLUMNS], gl.float32, MMA)
                acc += (mma_v2(early, x, nothing) + mma_v2(late, x_late, nothing)) * times.to(gl.float32)[:, :, None]
                times = coming
                coming = later
            else:
                acc = mma_v2(early, x, acc)
                other = mma_v2(late, x_late, other)
        parts.store(acc + other)
        gl.thread_barrier()
        y = gl.sum(parts.slice(0, OUTPUTS, 1).load(LAYOUT), axis=0) * (scale[:, None] * factor)
        if GATED:
            up = gl.sum(parts.slice(OUTPUTS, OUTPUTS, 1).load(LAYOUT), axis=0) * (up_scale[:, None] * factor)
        if SPLIT > 1:
            place = ((group * SPLIT + share) * most + i) * (16 * COLUMNS)
            gl.store(partial_ptr + place + column[None, :] * 16 + output[:, None], y)
        else:
            if BIAS:
                y += gl.load(bias_ptr + n, n < N, 0.0).to(gl.float32)[:, None]
                if GATED:
                    up += gl.load(bias_ptr + N + n, n < N, 0.0).to(gl.float32)[:, None]
            if GATED:
                y = y / (1.0 + gl.exp(-y)) * up
            if RESIDUAL:
                y += residual
            gl.store(out_at, y.to(out_at.dtype.element_ty), in_out)
    if SPLIT > 1:
        gl.thread_barrier()  # every thread's part is written before one of them says so
        if gl.atomic_add(counter_ptr + group, 1, sem="acq_rel") == SPLIT - 1:
            gl.store(counter_ptr + group, 0)
            _add_up(
                partial_ptr, bias_ptr, out_ptr, M, N, out_stride, group, groups, own, most, SPLIT, COLUMNS, BIAS,
                RESIDUAL,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "blocks", "units"])
def _fp8_ring_kernel(
    x_ptr, w_desc, scale_ptr, bias_ptr, gain_ptr, out_ptr, partial_ptr, counter_ptr, M, N, x_stride, out_stride,
    blocks, units, eps,
    K: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, INTEGERS: gl.constexpr,
    BLOCKS: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, EARLY: gl.constexpr,
    PDL: gl.constexpr, FLIGHT: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = 32 * W
    STEPS: gl.constexpr = (K + 4 * WIDTH * SPLIT - 1) // (4 * WIDTH * SPLIT)
    COLUMNS: gl.constexpr = max(ROWS, 8)  # the matrix units take no fewer
    KEPT: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2 if ROWS > 1 else 1, [1, 0])
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, 2, 8, WIDTH], w_desc.layout)
    kept = gl.allocate_shared_memory(
        gl.float16 if ROWS == 1 else x_ptr.dtype.element_ty, [STEPS, ROWS, 4 * WIDTH], KEPT
    )
    parts = gl.allocate_shared_memory(gl.float32, [W, 16, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    groups = gl.num_programs(0) // SPLIT
    group = gl.program_id(0) // SPLIT
    share = gl.program_id(0) % SPLIT
    begin = share * (STEPS * WIDTH)
    own = (units - group + groups - 1) // groups
    most = (units + groups - 1) // groups
    gl.warp_specialize(
        [
            (_consume, (
                x_ptr, scale_ptr, bias_ptr, gain_ptr, out_ptr, partial_ptr, counter_ptr, ring, kept, parts, full, empty,
                M, N, x_stride, out_stride, blocks, eps, begin, group, groups, share, own, most, K, SPLIT, STEPS,
                INTEGERS, BLOCKS, NORM, GATED, BIAS, RESIDUAL, EARLY, PDL,
            )),
            (_produce, (w_desc, ring, full, empty, begin, group, groups, own, STEPS, FLIGHT, GATED)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


def registers(k: int, plan: Ring) -> int:
    """Of a thread: two programs leave room for others beside them; a long row takes more before it is kept."""
    return 64 if plan.programs == 2 and k <= 8 * RING_COLUMNS else 80


def _described(weight: torch.Tensor, gated: bool) -> TensorDescriptor:
    """The weight's words, 8 lines here and 8 there."""
    words = weight.view(torch.int32)
    (lines, width), stride = words.shape, words.stride(0)
    shape, apart = ([2, lines // 2, width], lines // 2) if gated else ([lines // 8, 8, width], 8)
    return TensorDescriptor(words, shape, [apart * stride, stride, 1], [2, 8, RING_COLUMNS // 4], WORDS_IN_SHARED)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: bool,
    out: torch.Tensor,
    plan: Ring,
) -> torch.Tensor:
    """x [m, k] → out [m, n]; with `residual` the result is added to what stands there. norm: of one row.

    weight e4m3 or int8 [n, k], scale of its lines [n] or of their blocks of 128 columns [n, blocks]; lines are a
    multiple of 16 bytes long and apart, n a multiple of 8. See `quire.kernels.gemm.linear`.
    """
    (m, k), n = x.shape, out.shape[1]
    gain, eps = norm or (x, 0.0)
    rows = 1 if m == 1 else 8 if m <= 8 else 16
    units = cdiv(n, 8 if gated else 16)
    groups = min(units, plan.programs * num_processors(x.device) // plan.split)
    partial = counters = scale  # not read
    if plan.split > 1:
        sums = groups * plan.split * cdiv(units, groups) * 16 * max(rows, 8)
        partial = torch.empty(sums, dtype=torch.float32, device=x.device)
        counters = _counters(x.device, torch.cuda.current_stream(x.device).cuda_stream)
    pdl = has_pdl(x.device)
    _fp8_ring_kernel[(groups * plan.split,)](
        x, _described(weight, gated), scale, x if bias is None else bias, gain, out, partial, counters,
        m, n, x.stride(0), out.stride(0), scale.stride(0), units, eps, K=k, ROWS=rows, STAGES=plan.stages,
        SPLIT=plan.split, INTEGERS=weight.dtype == torch.int8, BLOCKS=scale.dim() == 2,
        NORM=norm is not None, GATED=gated, BIAS=bias is not None, RESIDUAL=residual, EARLY=plan.early,
        FLIGHT=plan.flight, PDL=pdl, maxnreg=registers(k, plan), launch_pdl=pdl, **OPTIONS,
    )  # fmt: skip
    return out
