"""Triton twin of `kernels/recurrent/channel_delta.py`: a program goes through a row's tokens one by one, with some
columns of a head's state in registers; the state is read and written once a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.rows import Rows
from quire.kernels.recurrent.triton.parts import place_of
from quire.kernels.triton.launch import next_power_of_2

_COLUMNS = 32  # of a head's state, a program
_EPS = 1e-6


@triton.jit
def _channel_delta_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr, query_start_ptr,
    q_stride, k_stride, v_stride, decay_stride, beta_stride, page_stride, pages_stride, heads, scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(query_start_ptr + row).to(tl.int64)
    length = (tl.load(query_start_ptr + row + 1) - start).to(tl.int32)
    if length == 0:
        return
    line, column = tl.arange(0, KEY_WIDTH), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    there = (line < KEY)[:, None] & (column < VALUE)[None, :]
    at = state_ptr + page * page_stride + (head * KEY + line)[:, None] * VALUE + column[None, :]
    state = tl.load(at, there & goes_on, 0.0).to(tl.float32)
    of_keys, of_values = head * KEY + line, head * VALUE + column
    for step in range(length):
        token = start + step
        q = tl.load(q_ptr + token * q_stride + of_keys, line < KEY, 0.0).to(tl.float32)
        k = tl.load(k_ptr + token * k_stride + of_keys, line < KEY, 0.0).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, axis=0) + EPS) * scale
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
        v = tl.load(v_ptr + token * v_stride + of_values, column < VALUE, 0.0).to(tl.float32)
        decay = tl.load(decay_ptr + token * decay_stride + of_keys, line < KEY, 0.0)
        state = state * tl.exp(decay)[:, None]
        correction = (v - tl.sum(state * k[:, None], axis=0)) * tl.load(beta_ptr + token * beta_stride + head)
        state += k[:, None] * correction[None, :]
        y = tl.sum(state * q[:, None], axis=0)
        tl.store(out_ptr + token * heads * VALUE + of_values, y.to(out_ptr.dtype.element_ty), column < VALUE)
    tl.store(at, state.to(state_ptr.dtype.element_ty), there & is_live)


def channel_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    rows: Rows,
    entry: int,
) -> torch.Tensor:
    """See `quire.kernels.recurrent.channel_delta`."""
    heads, key, value = state.shape[1:]
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)  # what is nobody's stays finite
    pages = rows.pages[:, entry]
    columns = min(_COLUMNS, next_power_of_2(value))
    strides = (part.stride(0) for part in (q, k, v, decay, beta, state, pages))
    _channel_delta_kernel[(rows.num_rows, heads, -(-value // columns))](
        q, k, v, decay, beta, state, out, pages, rows.goes_on, rows.is_live, rows.query_start, *strides, heads,
        key**-0.5, KEY=key, VALUE=value, KEY_WIDTH=next_power_of_2(key), COLUMNS=columns, EPS=_EPS, num_warps=4,
    )  # fmt: skip
    return out
