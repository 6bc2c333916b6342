"""Experts of so few tokens that hardly two want the same: no order, every choice by itself, on the ordinary cores.

Gate and up: a program has some outputs of one choice. Down: some outputs of one token, over all of its experts, which
are added to the residual as they are; so it takes two kernels in all. Products stay spread over K until one reduction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.moe.inside import Inside
from quire.kernels.moe.triton.inside import gated, squared
from quire.kernels.moe.triton.plan import Direct
from quire.kernels.triton.launch import has_pdl, next_power_of_2


@triton.jit
def _direct_gate_up_kernel(
    x_ptr, gain_ptr, weight_ptr, scale_ptr, bias_ptr, experts_ptr, out_ptr, x_stride, eps,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    NORM: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, SHIFT: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    n, choice = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    k = tl.arange(0, COLUMNS)
    in_n = (n < N)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts_ptr + choice).to(tl.int64)
    if expert < 0:
        return
    LINES: tl.constexpr = N if SQUARED else 2 * N
    UP: tl.constexpr = LINES - N  # how far behind the gate's lines, or what is in their place, those of up are
    lines = weight_ptr + (expert * LINES + n)[:, None] * K + k[None, :]
    x_at = x_ptr + (choice // TOP_K).to(tl.int64) * x_stride + k
    acc = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    acc_up = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    gate = tl.load(lines, in_n & (k < K)[None, :], 0.0)
    up = gate
    if not SQUARED:
        up = tl.load(lines + UP * K, in_n & (k < K)[None, :], 0.0)
    for start in tl.static_range(0, K, COLUMNS):
        gate_now, up_now = gate.to(tl.float32), up.to(tl.float32)
        if start + COLUMNS < K:
            ahead = start + COLUMNS
            gate = tl.load(lines + ahead, in_n & (ahead + k < K)[None, :], 0.0)
            if not SQUARED:
                up = tl.load(lines + ahead + UP * K, in_n & (ahead + k < K)[None, :], 0.0)
        x = tl.load(x_at + start, start + k < K, 0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(gain_ptr + start + k, start + k < K, 0.0).to(tl.float32)
        acc += x[None, :] * gate_now
        if not SQUARED:
            acc_up += x[None, :] * up_now
    y, z = tl.sum(acc, axis=1), tl.sum(acc_up, axis=1)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= factor
        z *= factor
    if SCALED:
        scales = scale_ptr + expert * LINES + n
        y *= tl.load(scales, n < N, 0.0)
        z *= tl.load(scales + UP, n < N, 0.0)
    if BIAS:
        biases = bias_ptr + expert * LINES + n
        y += tl.load(biases, n < N, 0.0).to(tl.float32)
        z += tl.load(biases + UP, n < N, 0.0).to(tl.float32)
    if SQUARED:
        y = squared(y)
    else:
        y = gated(y, z, ALPHA, LIMIT, SHIFT)
    tl.store(out_ptr + choice.to(tl.int64) * N + n, y.to(out_ptr.dtype.element_ty), n < N)


@triton.jit
def _direct_down_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, experts_ptr, share_ptr, residual_ptr, residual_stride,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, TOP_BLOCK: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    n, token = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    place, k = tl.arange(0, TOP_BLOCK), tl.arange(0, COLUMNS)
    choice = token * TOP_K + place
    # Ahead of the wait: the kernel before this one has waited for who made the choices, ere this one could begin.
    expert = tl.load(experts_ptr + choice, place < TOP_K, -1).to(tl.int64)
    there = expert >= 0
    out = residual_ptr + token.to(tl.int64) * residual_stride + n
    if tl.max(expert, axis=0) < 0:
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
    config: Direct,
) -> torch.Tensor:
    """See `quire.kernels.moe.experts`."""
    gate, first, second = inside
    (tokens, top_k), n, k = experts.shape, down.shape[2], x.shape[1]
    inner = torch.empty((tokens * top_k, n), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, k), dtype=x.dtype, device=x.device) if residual is None else residual
    pdl = has_pdl(x.device)
    options = {"SCALED": scales is not None, "PDL": pdl, "launch_pdl": pdl}
    _direct_gate_up_kernel[(triton.cdiv(n, config.outputs), tokens * top_k)](
        x, gate_up if norm is None else norm[0], gate_up, gate_up if scales is None else scales[0],
        gate_up if first is None else first, experts, inner, x.stride(0), 0.0 if norm is None else norm[1], N=n,
        K=k, TOP_K=top_k, OUTPUTS=config.outputs, COLUMNS=config.columns,
        NORM=norm is not None, BIAS=first is not None, ALPHA=gate.alpha, LIMIT=gate.limit, SHIFT=gate.shift,
        SQUARED=gate.squared, num_warps=config.warps, **options,
    )  # fmt: skip
    _direct_down_kernel[(triton.cdiv(k, config.down_outputs), tokens)](
        inner, down, down if scales is None else scales[1], down if second is None else second, experts, weights,
        out, out.stride(0), N=k, K=n,
        TOP_K=top_k, TOP_BLOCK=next_power_of_2(top_k), OUTPUTS=config.down_outputs,
        COLUMNS=config.down_columns, BIAS=second is not None, ADD=residual is not None, num_warps=config.down_warps,
        **options,
    )  # fmt: skip
    return out
