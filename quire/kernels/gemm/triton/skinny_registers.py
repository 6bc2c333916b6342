"""x @ weight.T for up to 16 rows, with norm, gate and residual sum, on the matrix units: reading the weight once, as
fast as memory gives it, is the whole job.

A program owns a few outputs, whose weights are the tall operand; its warps share K. The weight goes from memory
straight into the registers that the matrix units read: the order in which the elements of K are multiplied is free as
long as the weight's and x's agree, so each thread takes the 8 neighbours that one load brings. With programmatic
dependent launch a program has asked for the first tiles of its weight, which no kernel of a step writes, before it
waits for its predecessor: for K up to a few thousand, for all of them. The norm's factor is one number a row: the
squares are summed while x passes by, and the sums of products divided at the end.

In Gluon, because Triton proper would take the weight through shared memory, and only after the wait. No interpreter
runs this.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gemm.triton.plan import Registers
from quire.kernels.triton.launch import cdiv, has_pdl


@gluon.constexpr_function
def _mma(warps):
    """Sums [warps, outputs, rows]: every warp has its own share of K."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _results(warps, outputs):
    """[warps, outputs, rows] with all shares of an element in one thread, which then adds them."""
    tall = min(outputs // 8, warps)
    return gl.BlockedLayout([warps, 1, 1], [1, 8, 4], [1, tall, warps // tall], [1, 2, 0])


@gluon.jit
def _weight_at(
    weight_ptr, first, N, stride,
    OUTPUTS: gl.constexpr, USED: gl.constexpr, LINES: gl.constexpr, STEP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Pointers to the first tile [warps, lines, k], which lines exist, and the elements of K. Gates, then ups."""
    line = gl.arange(0, LINES, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    output = first + line % OUTPUTS
    inside = ((output < N) & (line < USED))[None, :, None]
    share = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    k = share * STEP + gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    row = (output + line // OUTPUTS * N).to(gl.int64)
    return weight_ptr + (row * stride)[None, :, None] + k, inside, k


@gluon.jit
def _x_at(x_ptr, M, stride, COLUMNS: gl.constexpr, STEP: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers to the first tile [warps, k, rows], which rows exist, and the elements of K."""
    row = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    share = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    k = share * STEP + gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    return x_ptr + row * stride + k, row < M, k


@gluon.jit
def _tile(at, inside, k, offset, WHOLE: gl.constexpr, K: gl.constexpr):
    """The tile at `offset` along K; WHOLE: none of it lies beyond K."""
    if WHOLE:
        y = gl.load(at + offset, inside, 0.0)
    else:
        y = gl.load(at + offset, inside & (k + offset < K), 0.0)
    return y


@gluon.jit
def _normed(x, gain, squares, NORM: gl.constexpr):
    """x ∘ gain in x's own dtype, and the squares [warps, rows] so far."""
    if NORM:
        wide = x.to(gl.float32)
        squares += gl.sum(wide * wide, axis=1)
        x = (wide * gain.to(gl.float32)).to(x.dtype)
    return x, squares


@gluon.jit
def _widened(weight, like):
    """See `fp8_widen`."""
    if weight.dtype.primitive_bitwidth == 8 and like.dtype == gl.bfloat16:
        weight = weight.to(gl.float16).to(gl.float32)
    return weight.to(like.dtype)


@gluon.jit
def _out_at(out_ptr, first, M, N, stride, COLUMNS: gl.constexpr, OUTPUTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers to the results [outputs, rows], which of them exist, and the outputs' numbers."""
    n = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))
    m = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    return out_ptr + m[None, :] * stride + n[:, None], (n < N)[:, None] & (m < M)[None, :], n


@gluon.jit
def _finish(
    acc, squares, residual, out_at, in_out, n, scale_ptr, bias_ptr, N, eps,
    K: gl.constexpr, OUTPUTS: gl.constexpr, LAYOUT: gl.constexpr, SCALED: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """The warps' sums added up, in their order; scaled, gated, added to the residual, and stored."""
    RESULT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    parts = gl.allocate_shared_memory(gl.float32, acc.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), acc)
    if NORM:
        sums = gl.allocate_shared_memory(gl.float32, squares.shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), squares)
    y = gl.sum(parts.slice(0, OUTPUTS, 1).load(LAYOUT), axis=0)
    if GATED:
        up = gl.sum(parts.slice(OUTPUTS, OUTPUTS, 1).load(LAYOUT), axis=0)
    if NORM:
        total = gl.sum(sums.load(gl.SliceLayout(1, LAYOUT)), axis=0)
        scale = gl.rsqrt(gl.convert_layout(total, gl.SliceLayout(0, RESULT)) / K + eps)[None, :]
        y *= scale
        if GATED:
            up *= scale
    if SCALED:
        y *= gl.load(scale_ptr + n, n < N, 0.0)[:, None]
        if GATED:
            up *= gl.load(scale_ptr + N + n, n < N, 0.0)[:, None]
    if BIAS:
        y += gl.load(bias_ptr + n, n < N, 0.0).to(gl.float32)[:, None]
        if GATED:
            up += gl.load(bias_ptr + N + n, n < N, 0.0).to(gl.float32)[:, None]
    if GATED:
        y = y / (1.0 + gl.exp(-y)) * up
    if RESIDUAL:
        y += residual
    gl.store(out_at, y.to(out_at.dtype.element_ty), in_out)


@gluon.jit(do_not_specialize=["M"])
def _register_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, gain_ptr, out_ptr, M, N, x_stride, weight_stride, out_stride, eps,
    K: gl.constexpr, OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr, DEPTH: gl.constexpr,
    SCALED: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = WARPS * STEP
    STEPS: gl.constexpr = (K + WIDTH - 1) // WIDTH
    USED: gl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    LINES: gl.constexpr = max(USED, 16)  # the matrix units take no fewer
    MMA: gl.constexpr = _mma(WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=8)
    LAYOUT: gl.constexpr = _results(WARPS, OUTPUTS)

    first = gl.program_id(0) * OUTPUTS
    weight_at, in_n, k = _weight_at(weight_ptr, first, N, weight_stride, OUTPUTS, USED, LINES, STEP, LEFT)
    weights = ()
    for i in gl.static_range(DEPTH):
        weights += (_tile(weight_at, in_n, k, i * WIDTH, (i + 1) * WIDTH <= K, K),)
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    x_at, in_m, x_k = _x_at(x_ptr, M, x_stride, COLUMNS, STEP, RIGHT)
    X_DEPTH: gl.constexpr = min(DEPTH, 2)
    xs = ()
    for i in gl.static_range(X_DEPTH):
        xs += (_tile(x_at, in_m, x_k, i * WIDTH, (i + 1) * WIDTH <= K, K),)
    out_at, in_out, n = _out_at(out_ptr, first, M, N, out_stride, COLUMNS, OUTPUTS, LAYOUT)
    residual = 0.0
    if RESIDUAL:
        residual = gl.load(out_at, in_out, 0.0).to(gl.float32)
    acc = gl.zeros([WARPS, LINES, COLUMNS], gl.float32, MMA)
    squares = gl.zeros([WARPS, COLUMNS], gl.float32, gl.SliceLayout(1, RIGHT))
    for i in gl.static_range(STEPS):
        weight, x = weights[0], xs[0]
        weights, xs = weights[1:], xs[1:]
        if i + DEPTH < STEPS:
            weights += (_tile(weight_at, in_n, k, (i + DEPTH) * WIDTH, (i + DEPTH + 1) * WIDTH <= K, K),)
        if i + X_DEPTH < STEPS:
            xs += (_tile(x_at, in_m, x_k, (i + X_DEPTH) * WIDTH, (i + X_DEPTH + 1) * WIDTH <= K, K),)
        gain = x
        if NORM:
            gain = _tile(gain_ptr + x_k, x_k >= 0, x_k, i * WIDTH, (i + 1) * WIDTH <= K, K)
        x, squares = _normed(x, gain, squares, NORM)
        acc = mma_v2(_widened(weight, x), x, acc)
    _finish(
        acc, squares, residual, out_at, in_out, n, scale_ptr, bias_ptr, N, eps,
        K, OUTPUTS, LAYOUT, SCALED, NORM, GATED, BIAS, RESIDUAL,
    )  # fmt: skip


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: bool,
    out: torch.Tensor,
    plan: Registers,
    scale: torch.Tensor | None = None,
    *,
    late: bool = False,
) -> torch.Tensor:
    """x [m, k] → out [m, n]; with `residual` the result is added to what stands there. See `quire.kernels.gemm.linear`.

    scale: float32, of each line of a weight of 8 bits. late: the next kernel starts once what comes before this one is
    there."""
    (m, k), n = x.shape, out.shape[1]
    gain, eps = norm or (weight, 0.0)
    # One row's kernels are so short that those in line only take memory's rate from one another.
    early = m > 1 and not late
    pdl = has_pdl(x.device)
    _register_kernel[(cdiv(n, plan.outputs),)](
        x, weight, weight if scale is None else scale, weight if bias is None else bias, gain, out, m, n,
        x.stride(0), weight.stride(0), out.stride(0), eps, K=k, OUTPUTS=plan.outputs, COLUMNS=8 if m <= 8 else 16,
        STEP=plan.step, DEPTH=min(plan.depth, cdiv(k, plan.step * plan.warps)), SCALED=scale is not None,
        NORM=norm is not None, GATED=gated, BIAS=bias is not None, RESIDUAL=residual, EARLY=early, PDL=pdl,
        num_warps=plan.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
