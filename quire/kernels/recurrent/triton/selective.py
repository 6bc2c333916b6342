"""Triton twins of `kernels/recurrent/selective.py`: some channels of a row a program, token by token, their states in
registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.rows import Rows
from quire.kernels.recurrent.triton.parts import place_of, softplus
from quire.kernels.triton.launch import next_power_of_2

if TYPE_CHECKING:
    from quire.kernels.recurrent.weights import SelectiveWeights

_CHANNELS = 64  # a program


@triton.jit
def _selective_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, a_ptr, d_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    query_start_ptr, x_stride, dt_stride, b_stride, c_stride, page_stride, pages_stride, channels,
    STATE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(query_start_ptr + row).to(tl.int64), tl.load(query_start_ptr + row + 1).to(tl.int64)
    if start == end:
        return
    channel, column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside = channel < channels
    there = inside[:, None] & (column < STATE)[None, :]
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    within = channel[:, None] * STATE + column[None, :]
    state = tl.load(state_ptr + page * page_stride + within, there & goes_on, 0.0)
    a = tl.load(a_ptr + within, there, 0.0)
    d = tl.load(d_ptr + channel, inside, 0.0)
    for token in range(start, end):
        x = tl.load(x_ptr + token * x_stride + channel, inside, 0.0).to(tl.float32)
        dt = softplus(tl.load(dt_ptr + token * dt_stride + channel, inside, 0.0).to(tl.float32))
        b = tl.load(b_ptr + token * b_stride + column, column < STATE, 0.0).to(tl.float32)
        c = tl.load(c_ptr + token * c_stride + column, column < STATE, 0.0).to(tl.float32)
        state = state * tl.exp(dt[:, None] * a) + (dt * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], axis=1) + d * x
        tl.store(out_ptr + token * channels + channel, y.to(out_ptr.dtype.element_ty), inside)
    tl.store(state_ptr + page * page_stride + within, state, there & is_live)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SelectiveWeights,
    state: torch.Tensor,
    rows: Rows,
    entry: int,
) -> torch.Tensor:
    """See `quire.kernels.recurrent.selective`."""
    channels, size = state.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.chunks is not None:
        out.zero_()  # what is nobody's stays finite
    pages = rows.pages[:, entry]
    strides = (part.stride(0) for part in (x, dt, b, c, state, pages))
    _selective_kernel[(rows.num_rows, -(-channels // _CHANNELS))](
        x, dt, b, c, weights.a, weights.d, state, out, pages, rows.goes_on, rows.is_live, rows.query_start, *strides,
        channels, STATE=size, WIDTH=next_power_of_2(size), BLOCK=_CHANNELS, num_warps=4,
    )  # fmt: skip
    return out
