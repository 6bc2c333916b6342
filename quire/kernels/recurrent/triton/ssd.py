"""Triton twins of `kernels/recurrent/ssd.py`. A decode row's state is read and written once. Of a prompt chunk a
program has some lines of a head's state in registers from its first token to its last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.triton.parts import place_of, precision, softplus
from quire.kernels.triton.launch import dot_width, next_power_of_2

if TYPE_CHECKING:
    from quire.kernels.recurrent.weights import SSDWeights

_LINES = 32  # of a head's state, a program


@triton.jit
def _ssd_decode_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, bias_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    x_stride, b_stride, c_stride, dt_stride, page_stride, pages_stride, least, most, heads, each,
    DIM: tl.constexpr, STATE: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, column = tl.program_id(2) * LINES + tl.arange(0, LINES), tl.arange(0, WIDTH)
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    there = (line < DIM)[:, None] & (column < STATE)[None, :]
    at = state_ptr + page * page_stride + (head * DIM + line)[:, None] * STATE + column[None, :]
    state = tl.load(at, there & goes_on, 0.0)
    dt = softplus(tl.load(dt_ptr + row * dt_stride + head).to(tl.float32) + tl.load(bias_ptr + head))
    dt = tl.minimum(tl.maximum(dt, least), most)
    x = tl.load(x_ptr + row * x_stride + head * DIM + line, line < DIM, 0.0).to(tl.float32)
    group = head // each
    b = tl.load(b_ptr + row * b_stride + group * STATE + column, column < STATE, 0.0).to(tl.float32)
    c = tl.load(c_ptr + row * c_stride + group * STATE + column, column < STATE, 0.0).to(tl.float32)
    state = state * tl.exp(dt * tl.load(a_ptr + head)) + (dt * x)[:, None] * b[None, :]
    tl.store(at, state, there & is_live)
    y = tl.sum(state * c[None, :], axis=1) + tl.load(d_ptr + head) * x
    tl.store(out_ptr + (row * heads + head) * DIM + line, y.to(out_ptr.dtype.element_ty), line < DIM)


@triton.jit(do_not_specialize=["first_row"])
def _ssd_prompt_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_ptr, d_ptr, bias_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    query_start_ptr, first_row, x_stride, b_stride, c_stride, dt_stride, page_stride, pages_stride, least, most,
    heads, each,
    DIM: tl.constexpr, STATE: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = (first_row + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    line, column, place = tl.program_id(2) * LINES + tl.arange(0, LINES), tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    start = tl.load(query_start_ptr + row).to(tl.int64)
    length = (tl.load(query_start_ptr + row + 1) - start).to(tl.int32)
    if length == 0:
        return
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    there = (line < DIM)[:, None] & (column < STATE)[None, :]
    at = state_ptr + page * page_stride + (head * DIM + line)[:, None] * STATE + column[None, :]
    state = tl.load(at, there & goes_on, 0.0)
    a, d, bias, group = tl.load(a_ptr + head), tl.load(d_ptr + head), tl.load(bias_ptr + head), head // each
    causal = place[:, None] >= place[None, :]
    for begin in range(0, length, CHUNK):
        token, real = start + begin + place, begin + place < length
        dt = softplus(tl.load(dt_ptr + token * dt_stride + head, real, 0.0).to(tl.float32) + bias)
        dt = tl.where(real, tl.minimum(tl.maximum(dt, least), most), 0.0)  # nothing decays, and nothing is added
        since, total = tl.cumsum(dt * a, axis=0), tl.sum(dt * a, axis=0)
        narrow, wide = real[:, None] & (line < DIM)[None, :], real[:, None] & (column < STATE)[None, :]
        x = tl.load(x_ptr + (token * x_stride + head * DIM)[:, None] + line[None, :], narrow, 0.0).to(tl.float32)
        b_at = (token * b_stride + group * STATE)[:, None] + column[None, :]
        c_at = (token * c_stride + group * STATE)[:, None] + column[None, :]
        b = tl.load(b_ptr + b_at, wide, 0.0).to(tl.float32)
        c = tl.load(c_ptr + c_at, wide, 0.0).to(tl.float32)
        decay = tl.exp(tl.where(causal, since[:, None] - since[None, :], 0.0))
        scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        scores = tl.where(causal, scores * decay * dt[None, :], 0.0)
        y = tl.dot(scores, x, input_precision=PRECISION)
        y += tl.dot(c, tl.trans(state), input_precision=PRECISION) * tl.exp(since)[:, None]
        left = x * (dt * tl.exp(total - since))[:, None]
        state = state * tl.exp(total) + tl.dot(tl.trans(left), b, input_precision=PRECISION)
        y += d * x
        y_at = out_ptr + ((token * heads + head) * DIM)[:, None] + line[None, :]
        tl.store(y_at, y.to(out_ptr.dtype.element_ty), narrow)
    tl.store(at, state, there & is_live)


def ssd(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    weights: SSDWeights,
    state: torch.Tensor,
    rows: Rows,
    entry: int,
) -> torch.Tensor:
    """See `quire.kernels.recurrent.ssd`."""
    (_, heads, dim), size = x.shape, b.shape[2]
    decodes, others = rows.num_decodes, rows.num_rows - rows.num_decodes
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if others:
        out.zero_()  # what is nobody's stays finite
    pages = rows.pages[:, entry]
    tensors = (
        x, b, c, dt, weights.a, weights.d, weights.dt_bias, state, out, pages, rows.goes_on, rows.is_live
    )  # fmt: skip
    strides = (*(part.stride(0) for part in (x, b, c, dt, state, pages)), *weights.limit, heads, heads // b.shape[1])
    if decodes:
        lines = min(_LINES, next_power_of_2(dim))
        _ssd_decode_kernel[(decodes, heads, -(-dim // lines))](
            *tensors, *strides, DIM=dim, STATE=size, LINES=lines, WIDTH=next_power_of_2(size), num_warps=4
        )
    if others:
        lines = min(_LINES, dot_width(dim))
        _ssd_prompt_kernel[(others, heads, -(-dim // lines))](
            *tensors, rows.query_start, decodes, *strides, DIM=dim, STATE=size, LINES=lines, WIDTH=dot_width(size),
            CHUNK=CHUNK, PRECISION=precision(x.dtype), num_warps=4, num_stages=1,
        )  # fmt: skip
    return out
