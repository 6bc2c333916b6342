"""x @ weight.T for one row, with norm, gate and residual sum, on the ordinary cores.

Each program owns BLOCK_N outputs and walks along K; products stay spread over K until one reduction at the end. With
programmatic dependent launch it fetches its first tile of the weight, which no kernel of a step writes, before it
waits for its predecessor. The norm's factor is one number: the squares are summed while x passes by.

The lines of the row's adapter are so few outputs more: a kernel of their own would cost as much time as hundreds of
them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.gemm.triton.plan import Vector
from quire.kernels.low_rank.factors import Factors
from quire.kernels.triton.launch import cdiv, has_pdl


class Down(NamedTuple):
    """An adapter's lines that the row is multiplied by besides, if it has an adapter."""

    factors: Factors  # of the weight's dtype
    slots: torch.Tensor  # int32 [1]
    inner: torch.Tensor  # float32 [1, 1, parts * room]: what they make of the row


@triton.jit
def _vector_kernel(
    x_ptr, weight_ptr, bias_ptr, gain_ptr, out_ptr, down_ptr, slot_ptr, ranks_ptr, inner_ptr, N, weight_stride, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr, ROOM: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight_ptr + n.to(tl.int64)[:, None] * weight_stride
    ups = weight_ptr + (N + n).to(tl.int64)[:, None] * weight_stride
    in_n = (n < N)[:, None]
    line = n - tl.cdiv(N, BLOCK_N) * BLOCK_N
    is_adapter = tl.program_id(0) >= tl.cdiv(N, BLOCK_N)
    if LINES:  # noqa: SIM102 (a constant)
        if is_adapter:
            slot = tl.load(slot_ptr)
            adapter = tl.maximum(slot - 1, 0)
            rank = tl.where(slot > 0, tl.load(ranks_ptr + 2 * adapter), 0)
            rows = down_ptr + (adapter.to(tl.int64) * LINES + line)[:, None] * K
            in_n = ((line < LINES) & (line % ROOM < rank))[:, None]
    weight = tl.load(rows + k[None, :], in_n & (k < K)[None, :], 0.0)
    up_weight = weight
    if GATED:
        up_weight = tl.load(ups + k[None, :], in_n & (k < K)[None, :], 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    residual = 0.0
    if RESIDUAL:
        residual = tl.load(out_ptr + n, n < N, 0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        here = start + k
        ahead = here + BLOCK_K
        x = tl.load(x_ptr + here, here < K, 0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(gain_ptr + here, here < K, 0.0).to(tl.float32)
        now = weight.to(tl.float32)
        weight = tl.load(rows + ahead[None, :], in_n & (ahead < K)[None, :], 0.0)
        acc += x[None, :] * now
        if GATED:
            now = up_weight.to(tl.float32)
            up_weight = tl.load(ups + ahead[None, :], in_n & (ahead < K)[None, :], 0.0)
            acc_up += x[None, :] * now
    y = tl.sum(acc, axis=1)
    up = tl.sum(acc_up, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        y *= scale
        up *= scale
    if LINES:  # noqa: SIM102 (a constant)
        if is_adapter:
            tl.store(inner_ptr + line, y, line < LINES)
    if BIAS:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + N + n, n < N, 0.0).to(tl.float32)
    if GATED:
        y = y * tl.sigmoid(y) * up
    tl.store(out_ptr + n, (y + residual).to(out_ptr.dtype.element_ty), n < N)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[torch.Tensor, float] | None,
    gated: bool,
    residual: bool,
    out: torch.Tensor,
    plan: Vector,
    down: Down | None = None,
) -> torch.Tensor:
    """x [1, k] → out [1, n]; with `residual` it is added to what stands there. See `quire.kernels.gemm.linear`.

    down: not with `gated`, nor with `residual`."""
    k, n = x.shape[1], out.shape[1]
    gain, eps = norm or (weight, 0.0)
    pdl, lines, room = has_pdl(x.device), 0, 1
    slots = ranks = inner = out
    factors = weight
    if down is not None:
        (factors, _, _, ranks, *_), slots, inner = down
        lines, room = down.factors.down.shape[1], down.factors.room
    _vector_kernel[(cdiv(n, plan.outputs) + cdiv(lines, plan.outputs),)](
        x, weight, weight if bias is None else bias, gain, out, factors, slots, ranks, inner, n, weight.stride(0), eps,
        K=k, BLOCK_N=plan.outputs, BLOCK_K=plan.width, LINES=lines, ROOM=room, NORM=norm is not None, GATED=gated,
        BIAS=bias is not None, RESIDUAL=residual, PDL=pdl, num_warps=plan.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
