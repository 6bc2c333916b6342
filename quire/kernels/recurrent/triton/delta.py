"""Triton twins of `kernels/recurrent/delta.py`. A decode row's state is read and written once. Of other rows the
triangular systems are solved first, piece by piece; then a program goes through a row with some columns of a head's
state in registers. Heads that fill whole tiles have faster kernels: see `delta_pieces.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.triton import delta_pieces
from quire.kernels.recurrent.triton.delta_pieces import EPS, decay_of, unit
from quire.kernels.recurrent.triton.parts import place_of, precision
from quire.kernels.triton.launch import dot_width, has_pdl, next_power_of_2

if TYPE_CHECKING:
    from quire.kernels.recurrent.weights import DeltaWeights

_DECODE_COLUMNS, _COLUMNS = 64, 32  # of a head's state, a program


@triton.jit
def _delta_decode_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    q_stride, k_stride, v_stride, a_stride, b_stride, page_stride, pages_stride, heads, each, scale, most,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    line, column = tl.arange(0, KEY_WIDTH), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    there = (line < KEY)[:, None] & (column < VALUE)[None, :]
    at = state_ptr + page * page_stride + (head * KEY + line)[:, None] * VALUE + column[None, :]
    state = tl.load(at, there & goes_on, 0.0).to(tl.float32)  # of a step before, and so ahead of the wait
    of_keys = (head // each) * KEY + line
    if PDL:
        tl.extra.cuda.gdc_wait()
    q = tl.load(q_ptr + row * q_stride + of_keys, line < KEY, 0.0).to(tl.float32)
    k = tl.load(k_ptr + row * k_stride + of_keys, line < KEY, 0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + EPS) * scale
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
    v = tl.load(v_ptr + row * v_stride + head * VALUE + column, column < VALUE, 0.0).to(tl.float32)
    state = state * tl.exp(decay_of(tl.load(a_ptr + row * a_stride + head), head, a_log_ptr, dt_bias_ptr))
    beta = most * tl.sigmoid(tl.load(b_ptr + row * b_stride + head).to(tl.float32))
    correction = (v - tl.sum(state * k[:, None], axis=0)) * beta
    state += k[:, None] * correction[None, :]
    tl.store(at, state.to(state_ptr.dtype.element_ty), there & is_live)
    y = tl.sum(state * q[:, None], axis=0)
    tl.store(out_ptr + (row * heads + head) * VALUE + column, y.to(out_ptr.dtype.element_ty), column < VALUE)


@triton.jit
def _delta_solve_kernel(
    k_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, inverse_ptr, piece_start_ptr, piece_length_ptr,
    k_stride, a_stride, b_stride, heads, each, most,
    KEY: tl.constexpr, KEY_WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """(1 + lower part of beta · k kᵀ · decay)⁻¹ of a piece, line by line: each needs those above it."""
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, start = tl.load(piece_length_ptr + piece), tl.load(piece_start_ptr + piece)
    if length == 0:
        return
    place, line = tl.arange(0, CHUNK), tl.arange(0, KEY_WIDTH)
    real, token = place < length, start + place
    decay = decay_of(tl.load(a_ptr + token * a_stride + head, real, 0.0), head, a_log_ptr, dt_bias_ptr)
    decay = tl.where(real, decay, 0.0)
    beta = most * tl.sigmoid(tl.load(b_ptr + token * b_stride + head, real, 0.0).to(tl.float32))
    k_at = k_ptr + (token * k_stride + (head // each) * KEY)[:, None] + line[None, :]
    k = unit(tl.load(k_at, real[:, None] & (line < KEY)[None, :], 0.0).to(tl.float32), 1, EPS)
    since = tl.cumsum(decay, axis=0)
    below = place[:, None] > place[None, :]
    pair = tl.exp(tl.where(below, since[:, None] - since[None, :], 0.0)) * beta[:, None]
    system = tl.where(below, tl.dot(k, tl.trans(k), input_precision=PRECISION) * pair, 0.0)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    for i in range(1, CHUNK):
        own = (place == i)[:, None]
        weights = tl.sum(tl.where(own, system, 0.0), axis=0)
        above = tl.sum(weights[:, None] * inverse, axis=0)
        inverse -= tl.where(own, above[None, :], 0.0)
    at = inverse_ptr + (piece * heads + head) * CHUNK * CHUNK + place[:, None] * CHUNK + place[None, :]
    tl.store(at, inverse)


@triton.jit(do_not_specialize=["first_row"])
def _delta_prompt_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    inverse_ptr, first_piece_ptr, query_start_ptr, first_row,
    q_stride, k_stride, v_stride, a_stride, b_stride, page_stride, pages_stride, heads, each, scale, most,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row, head = (first_row + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    start = tl.load(query_start_ptr + row).to(tl.int64)
    length = (tl.load(query_start_ptr + row + 1) - start).to(tl.int32)
    if length == 0:
        return
    line, column = tl.arange(0, KEY_WIDTH), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, CHUNK)
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    there = (line < KEY)[:, None] & (column < VALUE)[None, :]
    at = state_ptr + page * page_stride + (head * KEY + line)[:, None] * VALUE + column[None, :]
    state = tl.load(at, there & goes_on, 0.0).to(tl.float32)
    piece, group = tl.load(first_piece_ptr + row), head // each
    causal = place[:, None] >= place[None, :]
    for begin in range(0, length, CHUNK):
        token, real = start + begin + place, begin + place < length
        decay = decay_of(tl.load(a_ptr + token * a_stride + head, real, 0.0), head, a_log_ptr, dt_bias_ptr)
        decay = tl.where(real, decay, 0.0)
        beta = most * tl.sigmoid(tl.load(b_ptr + token * b_stride + head, real, 0.0).to(tl.float32))
        since, total = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
        of_keys, keys = (group * KEY + line)[None, :], real[:, None] & (line < KEY)[None, :]
        q = unit(tl.load(q_ptr + (token * q_stride)[:, None] + of_keys, keys, 0.0).to(tl.float32), 1, EPS) * scale
        k = unit(tl.load(k_ptr + (token * k_stride)[:, None] + of_keys, keys, 0.0).to(tl.float32), 1, EPS)
        values = real[:, None] & (column < VALUE)[None, :]
        v_at = v_ptr + (token * v_stride + head * VALUE)[:, None] + column[None, :]
        v = tl.load(v_at, values, 0.0).to(tl.float32)
        inverse_at = inverse_ptr + (piece * heads + head) * CHUNK * CHUNK + place[:, None] * CHUNK + place[None, :]
        inverse = tl.load(inverse_at)
        known = tl.dot(k * (beta * tl.exp(since))[:, None], state, input_precision=PRECISION)
        correction = tl.dot(inverse, v * beta[:, None] - known, input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        pair = tl.exp(tl.where(causal, since[:, None] - since[None, :], 0.0))
        scores = tl.where(causal, scores * pair, 0.0)
        y = tl.dot(q * tl.exp(since)[:, None], state, input_precision=PRECISION)
        y += tl.dot(scores, correction, input_precision=PRECISION)
        left = k * tl.exp(total - since)[:, None]
        state = state * tl.exp(total) + tl.dot(tl.trans(left), correction, input_precision=PRECISION)
        y_at = out_ptr + ((token * heads + head) * VALUE)[:, None] + column[None, :]
        tl.store(y_at, y.to(out_ptr.dtype.element_ty), values)
        piece += 1
    tl.store(at, state.to(state_ptr.dtype.element_ty), there & is_live)


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: DeltaWeights,
    state: torch.Tensor,
    rows: Rows,
    entry: int,
) -> torch.Tensor:
    """See `quire.kernels.recurrent.delta`."""
    heads, key, value = state.shape[1:]
    each, decodes, chunks = heads // q.shape[1], rows.num_decodes, rows.chunks
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    pages = rows.pages[:, entry]
    own = (weights.a_log, weights.dt_bias)
    tensors = (q, k, v, a, b, *own, state, out, pages, rows.goes_on, rows.is_live)
    strides = (*(part.stride(0) for part in (q, k, v, a, b, state, pages)), heads, each, key**-0.5, weights.most)
    if decodes:
        pdl, columns = has_pdl(v.device), min(_DECODE_COLUMNS, next_power_of_2(value))
        _delta_decode_kernel[(-(-value // columns), heads, decodes)](
            *tensors, *strides, KEY=key, VALUE=value, KEY_WIDTH=next_power_of_2(key), COLUMNS=columns, EPS=EPS,
            PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    if chunks is not None and delta_pieces.takes(v, state):
        delta_pieces.pieces(q, k, v, a, b, weights, state, out, rows, entry)
    elif chunks is not None:
        out[decodes:].zero_()  # what is nobody's stays finite
        exact, width = precision(v.dtype), dot_width(key)
        inverse = torch.empty(len(chunks.row), heads, CHUNK, CHUNK, dtype=torch.float32, device=v.device)
        _delta_solve_kernel[(len(chunks.row), heads)](
            k, a, b, *own, inverse, chunks.start, chunks.length, k.stride(0), a.stride(0), b.stride(0), heads, each,
            weights.most, KEY=key, KEY_WIDTH=width, CHUNK=CHUNK, PRECISION=exact, EPS=EPS, num_warps=4, num_stages=1,
        )  # fmt: skip
        columns = min(_COLUMNS, dot_width(value))
        _delta_prompt_kernel[(rows.num_rows - decodes, heads, -(-value // columns))](
            *tensors, inverse, chunks.first, rows.query_start, decodes, *strides, KEY=key, VALUE=value,
            KEY_WIDTH=width, COLUMNS=columns, CHUNK=CHUNK, PRECISION=exact, EPS=EPS, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out
