"""Triton twins of `kernels/recurrent/ssd.py`. A decode row's state is read and written once. Of other rows a program
first takes a head's state from piece to piece, and writes down what it is before each; then all pieces' outputs are
computed side by side. What goes into products is rounded to the model's type, and added up in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.triton.parts import blank, place_of, precision, softplus, stages
from quire.kernels.triton.launch import dot_width, has_pdl, next_power_of_2

if TYPE_CHECKING:
    from quire.kernels.recurrent.weights import SSDWeights

_LINES, _DECODE_LINES = 64, 32  # of a head's state, a program
_HEADS, _HEADS_OF_STEPS = 4, 32  # of a group that a program computes outputs of, or steps


@triton.jit
def _ssd_decode_kernel(
    x_ptr, b_ptr, c_ptr, dt_ptr, a_log_ptr, d_ptr, bias_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    x_stride, b_stride, c_stride, dt_stride, page_stride, pages_stride, least, most, heads, each,
    DIM: tl.constexpr, STATE: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    line, column = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, WIDTH)
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    there = (line < DIM)[:, None] & (column < STATE)[None, :]
    at = state_ptr + page * page_stride + (head * DIM + line)[:, None] * STATE + column[None, :]
    state = tl.load(at, there & goes_on, 0.0).to(tl.float32)  # of a step before, and so ahead of the wait
    a, d, bias = -tl.exp(tl.load(a_log_ptr + head)), tl.load(d_ptr + head), tl.load(bias_ptr + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
    dt = softplus(tl.load(dt_ptr + row * dt_stride + head).to(tl.float32) + bias)
    dt = tl.minimum(tl.maximum(dt, least), most)
    x = tl.load(x_ptr + row * x_stride + head * DIM + line, line < DIM, 0.0).to(tl.float32)
    group = head // each
    b = tl.load(b_ptr + row * b_stride + group * STATE + column, column < STATE, 0.0).to(tl.float32)
    c = tl.load(c_ptr + row * c_stride + group * STATE + column, column < STATE, 0.0).to(tl.float32)
    state = state * tl.exp(dt * a) + (dt * x)[:, None] * b[None, :]
    tl.store(at, state.to(state_ptr.dtype.element_ty), there & is_live)
    y = tl.sum(state * c[None, :], axis=1) + d * x
    tl.store(out_ptr + (row * heads + head) * DIM + line, y.to(out_ptr.dtype.element_ty), line < DIM)


@triton.jit
def _ssd_steps_kernel(
    dt_ptr, a_log_ptr, bias_ptr, dts_ptr, since_ptr, piece_start_ptr, piece_length_ptr, dt_stride, least, most, heads,
    HEADS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of a piece's tokens: the steps in time, and the logarithm of what is kept from the piece's beginning on."""
    piece, head = tl.program_id(1).to(tl.int64), tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    length, start = tl.load(piece_length_ptr + piece), tl.load(piece_start_ptr + piece)
    if length == 0:
        return
    place, there = tl.arange(0, CHUNK), head < heads
    real = (place < length)[:, None] & there[None, :]
    dt = tl.load(dt_ptr + ((start + place) * dt_stride)[:, None] + head[None, :], real, 0.0).to(tl.float32)
    dt = softplus(dt + tl.load(bias_ptr + head, there, 0.0)[None, :])
    dt = tl.where(real, tl.minimum(tl.maximum(dt, least), most), 0.0)  # nothing decays, and nothing is added
    since = tl.cumsum(dt * -tl.exp(tl.load(a_log_ptr + head, there, 0.0))[None, :], axis=0)
    at = ((piece * heads + head) * CHUNK)[None, :] + place[:, None]
    tl.store(dts_ptr + at, dt, there[None, :])
    tl.store(since_ptr + at, since, there[None, :])


@triton.jit(do_not_specialize=["first_row"])
def _ssd_states_kernel(
    x_ptr, b_ptr, dts_ptr, since_ptr, state_ptr, before_ptr, pages_ptr, goes_on_ptr, is_live_ptr, query_start_ptr,
    first_piece_ptr, first_row, x_stride, b_stride, page_stride, pages_stride, heads, each,
    DIM: tl.constexpr, STATE: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From piece to piece of a row; what the state is before each is written down."""
    row, head = (first_row + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    line, column, place = tl.program_id(2) * LINES + tl.arange(0, LINES), tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    start = tl.load(query_start_ptr + row).to(tl.int64)
    length = (tl.load(query_start_ptr + row + 1) - start).to(tl.int32)
    if length == 0:
        return
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    there = (line < DIM)[:, None] & (column < STATE)[None, :]
    within = (head * DIM + line)[:, None] * STATE + column[None, :]
    state = tl.load(state_ptr + page * page_stride + within, there & goes_on, 0.0).to(tl.float32)
    first, group = tl.load(first_piece_ptr + row), head // each
    before_at = before_ptr + first * heads * DIM * STATE + within
    steps_at = (first * heads + head) * CHUNK
    for begin in tl.range(0, length, CHUNK, num_stages=STAGES):
        tl.store(before_at, state.to(before_ptr.dtype.element_ty), there)
        before_at += heads * DIM * STATE
        token, real = start + begin + place, begin + place < length
        narrow, wide = real[:, None] & (line < DIM)[None, :], real[:, None] & (column < STATE)[None, :]
        x = tl.load(x_ptr + (token * x_stride + head * DIM)[:, None] + line[None, :], narrow, 0.0)
        b = tl.load(b_ptr + (token * b_stride + group * STATE)[:, None] + column[None, :], wide, 0.0)
        total = tl.load(since_ptr + steps_at + CHUNK - 1)
        kept = tl.load(dts_ptr + steps_at + place) * tl.exp(total - tl.load(since_ptr + steps_at + place))
        steps_at += heads * CHUNK
        left = (x.to(tl.float32) * kept[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(left), b, state * tl.exp(total), input_precision=PRECISION)
    at = state_ptr + page * page_stride + within
    tl.store(at, state.to(state_ptr.dtype.element_ty), there & is_live)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _ssd_outputs_kernel(
    x_ptr, b_ptr, c_ptr, dts_ptr, since_ptr, d_ptr, before_ptr, out_ptr, piece_start_ptr, piece_length_ptr,
    first_piece_ptr, query_start_ptr, num_rows, num_tokens, x_stride, b_stride, c_stride, heads, each,
    DIM: tl.constexpr, STATE: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of one piece and some heads of a group: what its own tokens and the state before it make."""
    piece, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * HEADS
    length, start = tl.load(piece_length_ptr + piece), tl.load(piece_start_ptr + piece)
    line, column, place = tl.arange(0, LINES), tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    if length == 0:
        for head in range(first, first + HEADS):
            blank(
                out_ptr, heads * DIM, head * DIM + line, line < DIM, piece, first_piece_ptr, query_start_ptr, num_rows,
                num_tokens, CHUNK,
            )  # fmt: skip
        return
    token, real, group = start + place, place < length, first // each
    narrow, wide = real[:, None] & (line < DIM)[None, :], real[:, None] & (column < STATE)[None, :]
    c = tl.load(c_ptr + (token * c_stride + group * STATE)[:, None] + column[None, :], wide, 0.0)
    b = tl.load(b_ptr + (token * b_stride + group * STATE)[:, None] + column[None, :], wide, 0.0)
    causal = place[:, None] >= place[None, :]
    products = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    for head in tl.range(first, first + HEADS, num_stages=STAGES):
        at = (piece * heads + head) * DIM * STATE + line[:, None] * STATE + column[None, :]
        before = tl.load(before_ptr + at, (line < DIM)[:, None] & (column < STATE)[None, :], 0.0)
        x = tl.load(x_ptr + (token * x_stride + head * DIM)[:, None] + line[None, :], narrow, 0.0)
        steps_at = (piece * heads + head) * CHUNK + place
        dt, since = tl.load(dts_ptr + steps_at), tl.load(since_ptr + steps_at)
        decay = tl.exp(tl.where(causal, since[:, None] - since[None, :], 0.0))
        scores = tl.where(causal, products * decay * dt[None, :], 0.0).to(x.dtype)
        y = tl.dot(c, tl.trans(before), input_precision=PRECISION) * tl.exp(since)[:, None]
        y = tl.dot(scores, x, y, input_precision=PRECISION) + tl.load(d_ptr + head) * x.to(tl.float32)
        y_at = out_ptr + ((token * heads + head) * DIM)[:, None] + line[None, :]
        tl.store(y_at, y.to(out_ptr.dtype.element_ty), narrow)


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
    decodes, others, chunks = rows.num_decodes, rows.num_rows - rows.num_decodes, rows.chunks
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pages = rows.pages[:, entry]
    tensors = (
        x, b, c, dt, weights.a_log, weights.d, weights.dt_bias, state, out, pages, rows.goes_on, rows.is_live
    )  # fmt: skip
    strides = (*(part.stride(0) for part in (x, b, c, dt, state, pages)), *weights.limit, heads, heads // b.shape[1])
    if decodes:
        pdl, lines = has_pdl(x.device), min(_DECODE_LINES, next_power_of_2(dim))
        _ssd_decode_kernel[(-(-dim // lines), heads, decodes)](
            *tensors, *strides, DIM=dim, STATE=size, LINES=lines, WIDTH=next_power_of_2(size), PDL=pdl, num_warps=2,
            launch_pdl=pdl,
        )  # fmt: skip
    if chunks is not None:
        pieces, lines, each = len(chunks.row), dot_width(dim), heads // b.shape[1]
        before = torch.empty(pieces, heads, dim, size, dtype=x.dtype, device=x.device)
        dts, since = torch.empty(2, pieces, heads, CHUNK, dtype=torch.float32, device=x.device)
        _ssd_steps_kernel[(-(-heads // _HEADS_OF_STEPS), pieces)](
            dt, weights.a_log, weights.dt_bias, dts, since, chunks.start, chunks.length, dt.stride(0), *weights.limit,
            heads, HEADS=_HEADS_OF_STEPS, CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
        narrow, together, number = min(_LINES, lines), math.gcd(_HEADS, each), x.element_size()
        width, tile = dot_width(size), CHUNK * x.element_size()
        ahead = stages(x.device, tile * (narrow + width), tile * narrow)
        ahead_of_head = stages(x.device, tile * lines + number * lines * width, tile * (width + CHUNK))
        sizes = {
            "DIM": dim, "STATE": size, "WIDTH": width, "CHUNK": CHUNK, "PRECISION": precision(x.dtype),
        }  # fmt: skip
        _ssd_states_kernel[(others, heads, -(-dim // narrow))](
            x, b, dts, since, state, before, pages, rows.goes_on, rows.is_live, rows.query_start, chunks.first, decodes,
            *(part.stride(0) for part in (x, b, state, pages)), heads, each, **sizes, LINES=narrow, STAGES=ahead,
            num_warps=4,
        )  # fmt: skip
        _ssd_outputs_kernel[(heads // together, pieces)](
            x, b, c, dts, since, weights.d, before, out, chunks.start, chunks.length, chunks.first, rows.query_start,
            rows.num_rows, len(x), *(part.stride(0) for part in (x, b, c)), heads, each, **sizes, LINES=lines,
            HEADS=together, STAGES=ahead_of_head, num_warps=4,
        )  # fmt: skip
    return out
