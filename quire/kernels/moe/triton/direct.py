"""Experts of so few tokens that hardly two want the same: no order, every choice by itself, on the ordinary cores.

Gate and up: a program has some outputs of one choice. Down: some outputs of one token, over all of its experts, which
are added to the residual as they are; so it takes two kernels in all. Products stay spread over K until one reduction.
What every token goes through besides, shared experts, goes along: their weights are known before the choice is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.moe.inside import Inside, Shared
from quire.kernels.moe.triton.inside import gated, squared
from quire.kernels.moe.triton.plan import Direct
from quire.kernels.triton.launch import cdiv, has_pdl, next_power_of_2


@triton.jit
def _pair(lines, up_at, inside, SQUARED: tl.constexpr):
    """Columns of lines of gate, and of those of up, `up_at` elements behind."""
    gate = tl.load(lines, inside, 0.0)
    up = gate
    if not SQUARED:
        up = tl.load(lines + up_at, inside, 0.0)
    return gate, up


@triton.jit
def _outputs(
    n, line, up, x_at, gain_ptr, weight_ptr, scale_ptr, bias_ptr, opening_ptr, out_at, eps,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, OPENED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, SQUARED: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Those with numbers `n`, of `line` of the weight, the gates, and as many `up` lines behind. OPENED: times how far
    the one line at `opening_ptr` opens for x. WAIT: once the first columns are sent for."""
    k = tl.arange(0, COLUMNS)
    in_n = (n < N)[:, None]
    lines = weight_ptr + line[:, None] * K + k[None, :]
    gates, ups = _pair(lines, up * K, in_n & (k < K)[None, :], SQUARED)
    if WAIT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    opening = tl.zeros([COLUMNS], tl.float32)
    for start in tl.static_range(0, K, COLUMNS):
        gates_now, ups_now = gates.to(tl.float32), ups.to(tl.float32)
        if start + COLUMNS < K:
            ahead = start + COLUMNS
            gates, ups = _pair(lines + ahead, up * K, in_n & (ahead + k < K)[None, :], SQUARED)
        x = tl.load(x_at + start + k, start + k < K, 0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(gain_ptr + start + k, start + k < K, 0.0).to(tl.float32)
        if OPENED:
            opening += x * tl.load(opening_ptr + start + k, start + k < K, 0.0).to(tl.float32)
        acc += x[None, :] * gates_now
        if not SQUARED:
            acc_up += x[None, :] * ups_now
    y, z, opened = tl.sum(acc, axis=1), tl.sum(acc_up, axis=1), tl.sum(opening, axis=0)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= factor
        z *= factor
        opened *= factor
    if SCALED:
        y *= tl.load(scale_ptr + line, n < N, 0.0)
        z *= tl.load(scale_ptr + line + up, n < N, 0.0)
    if BIAS:
        y += tl.load(bias_ptr + line, n < N, 0.0).to(tl.float32)
        z += tl.load(bias_ptr + line + up, n < N, 0.0).to(tl.float32)
    if SQUARED:
        y = squared(y)
    else:
        y = gated(y, z, ALPHA, LIMIT, SHIFT)
    if OPENED:
        y *= tl.sigmoid(opened)
    tl.store(out_at + n, y.to(out_at.dtype.element_ty), n < N)


@triton.jit
def _direct_gate_up_kernel(
    x_ptr, gain_ptr, weight_ptr, scale_ptr, bias_ptr, experts_ptr, out_ptr, shared_ptr, shared_scale_ptr,
    opening_ptr, x_stride, eps,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr, OPENED: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
    BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """SHARED: times N outputs that each token has besides those of its choices. Their programs come first, and send for
    weights before they wait; what they make stands behind what the choices make."""
    n, number = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    num_tokens = tl.num_programs(1) // (TOP_K + SHARED)
    choice = number - num_tokens * SHARED
    if SHARED:  # noqa: SIM102 (a constant)
        if choice < 0:
            x_at = x_ptr + (number // SHARED).to(tl.int64) * x_stride
            out_at = out_ptr + (num_tokens * TOP_K + number).to(tl.int64) * N
            line = (n + number % SHARED * N).to(tl.int64)
            _outputs(
                n, line, SHARED * N, x_at, gain_ptr, shared_ptr, shared_scale_ptr, bias_ptr, opening_ptr, out_at, eps,
                N, K, OUTPUTS, COLUMNS, NORM, SCALED, False, OPENED, ALPHA, LIMIT, SHIFT, SQUARED, PDL,
            )  # fmt: skip
    if choice >= 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        expert = tl.load(experts_ptr + choice).to(tl.int64)
        if expert >= 0:
            x_at = x_ptr + (choice // TOP_K).to(tl.int64) * x_stride
            out_at = out_ptr + choice.to(tl.int64) * N
            UP: tl.constexpr = 0 if SQUARED else N  # how far behind the gate's lines those of up are
            line = expert * (N + UP) + n
            _outputs(
                n, line, UP, x_at, gain_ptr, weight_ptr, scale_ptr, bias_ptr, opening_ptr, out_at, eps, N, K, OUTPUTS,
                COLUMNS, NORM, SCALED, BIAS, False, ALPHA, LIMIT, SHIFT, SQUARED, False,
            )  # fmt: skip


@triton.jit
def _direct_down_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, experts_ptr, share_ptr, residual_ptr, shared_ptr, shared_scale_ptr,
    residual_stride,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr, SHARED: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, SHARED_COLUMNS: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    n, token = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    place, k = tl.arange(0, TOP_BLOCK), tl.arange(0, COLUMNS)
    choice = token * TOP_K + place
    # Ahead of the wait: the kernel before this one has waited for who made the choices, ere this one could begin.
    expert = tl.load(experts_ptr + choice, place < TOP_K, -1).to(tl.int64)
    there = expert >= 0
    out = residual_ptr + token.to(tl.int64) * residual_stride + n
    if SHARED == 0 and tl.max(expert, axis=0) < 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if not ADD:
            tl.store(out, tl.zeros([OUTPUTS], residual_ptr.dtype.element_ty), n < N)
        return
    lines = weight_ptr + (expert[:, None, None] * N + n[None, :, None]) * K + k[None, None, :]
    inside = there[:, None, None] & (n < N)[None, :, None]
    share = tl.load(share_ptr + choice, there, 0.0)
    x_at = x_ptr + choice.to(tl.int64)[:, None] * K + k[None, :]
    factor = tl.broadcast_to(share[:, None], [TOP_BLOCK, OUTPUTS])
    if SCALED:
        scales = scale_ptr + expert[:, None] * N + n[None, :]
        factor *= tl.load(scales, there[:, None] & (n < N)[None, :], 0.0)
    acc = tl.zeros([TOP_BLOCK, OUTPUTS, COLUMNS], tl.float32)
    weight = tl.load(lines, inside & (k < K)[None, None, :], 0.0)
    SHARED_K: tl.constexpr = SHARED * K
    shared_k = tl.arange(0, SHARED_COLUMNS)
    shared_lines = shared_ptr + n.to(tl.int64)[:, None] * SHARED_K + shared_k[None, :]
    shared_weight = tl.zeros([OUTPUTS, SHARED_COLUMNS], weight_ptr.dtype.element_ty)
    if SHARED:
        shared_weight = tl.load(shared_lines, (n < N)[:, None] & (shared_k < SHARED_K)[None, :], 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in tl.static_range(0, K, COLUMNS):
        now = weight.to(tl.float32)
        if start + COLUMNS < K:
            ahead = start + COLUMNS
            weight = tl.load(lines + ahead, inside & (ahead + k < K)[None, None, :], 0.0)
        x = tl.load(x_at + start, there[:, None] & (start + k < K)[None, :], 0.0).to(tl.float32)
        acc += x[:, None, :] * now
    y = tl.sum(tl.sum(acc, axis=2) * factor, axis=0)
    if BIAS:
        biases = bias_ptr + expert[:, None] * N + n[None, :]
        bias = tl.load(biases, there[:, None] & (n < N)[None, :], 0.0).to(tl.float32)
        y += tl.sum(bias * share[:, None], axis=0)
    if SHARED:
        shared_acc = tl.zeros([OUTPUTS, SHARED_COLUMNS], tl.float32)
        shared_at = x_ptr + (tl.num_programs(1) * TOP_K + token * SHARED).to(tl.int64) * K + shared_k
        for start in tl.static_range(0, SHARED_K, SHARED_COLUMNS):
            now = shared_weight.to(tl.float32)
            if start + SHARED_COLUMNS < SHARED_K:
                ahead = start + SHARED_COLUMNS
                more = (n < N)[:, None] & (ahead + shared_k < SHARED_K)[None, :]
                shared_weight = tl.load(shared_lines + ahead, more, 0.0)
            x = tl.load(shared_at + start, start + shared_k < SHARED_K, 0.0).to(tl.float32)
            shared_acc += x[None, :] * now
        z = tl.sum(shared_acc, axis=1)
        if SCALED:
            z *= tl.load(shared_scale_ptr + n, n < N, 0.0)
        y += z
    if ADD:
        y += tl.load(out, n < N, 0.0).to(tl.float32)
    tl.store(out, y.to(residual_ptr.dtype.element_ty), n < N)


def add_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    norm: tuple[torch.Tensor, float] | None,
    inside: Inside,
    shared: Shared | None,
    config: Direct,
) -> torch.Tensor:
    """See `quire.kernels.moe.experts`."""
    gate, first, second = inside
    (tokens, top_k), n, k = experts.shape, down.shape[2], x.shape[1]
    beside = Shared(gate_up, down, scales) if shared is None else shared
    count = 0 if shared is None else shared.down.shape[1] // n
    opens = None if shared is None else shared.gate
    inner = torch.empty((tokens * (top_k + count), n), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, k), dtype=x.dtype, device=x.device) if residual is None else residual
    pdl = has_pdl(x.device)
    options = {"SCALED": scales is not None, "PDL": pdl, "launch_pdl": pdl}
    _direct_gate_up_kernel[(cdiv(n, config.outputs), tokens * (top_k + count))](
        x, gate_up if norm is None else norm[0], gate_up, gate_up if scales is None else scales[0],
        gate_up if first is None else first, experts, inner, beside.gate_up,
        gate_up if beside.scales is None else beside.scales[0], gate_up if opens is None else opens, x.stride(0),
        0.0 if norm is None else norm[1], N=n, K=k, TOP_K=top_k, SHARED=count, OPENED=opens is not None,
        OUTPUTS=config.outputs, COLUMNS=config.columns,
        NORM=norm is not None, BIAS=first is not None, ALPHA=gate.alpha, LIMIT=gate.limit, SHIFT=gate.shift,
        SQUARED=gate.squared, num_warps=config.warps, **options,
    )  # fmt: skip
    _direct_down_kernel[(cdiv(k, config.down_outputs), tokens)](
        inner, down, down if scales is None else scales[1], down if second is None else second, experts, weights,
        out, beside.down, down if beside.scales is None else beside.scales[1], out.stride(0), N=k, K=n,
        TOP_K=top_k, TOP_BLOCK=next_power_of_2(top_k), SHARED=count, OUTPUTS=config.down_outputs,
        COLUMNS=config.down_columns, SHARED_COLUMNS=config.shared_columns, BIAS=second is not None,
        ADD=residual is not None, num_warps=config.down_warps, **options,
    )  # fmt: skip
    return out
