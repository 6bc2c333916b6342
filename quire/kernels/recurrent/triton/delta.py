"""Triton twins of `kernels/recurrent/delta.py`. A decode row's state is read and written once. Of prompt chunks the
triangular systems are solved first, piece by piece; then a program goes through a row with some columns of a head's
state in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.triton.parts import place_of, precision
from quire.kernels.triton.launch import dot_width, next_power_of_2

_COLUMNS = 32  # of a head's state, a program
EPS = 1e-6


@triton.jit
def _unit(x, axis: tl.constexpr, EPS: tl.constexpr):
    return x * tl.expand_dims(tl.rsqrt(tl.sum(x * x, axis=axis) + EPS), axis)


@triton.jit
def _delta_decode_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    q_stride, k_stride, v_stride, decay_stride, beta_stride, page_stride, pages_stride, heads, each, scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, column = tl.arange(0, KEY_WIDTH), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    there = (line < KEY)[:, None] & (column < VALUE)[None, :]
    at = state_ptr + page * page_stride + (head * KEY + line)[:, None] * VALUE + column[None, :]
    state = tl.load(at, there & goes_on, 0.0)
    of_keys = (head // each) * KEY + line
    q = tl.load(q_ptr + row * q_stride + of_keys, line < KEY, 0.0).to(tl.float32)
    k = tl.load(k_ptr + row * k_stride + of_keys, line < KEY, 0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + EPS) * scale
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
    v = tl.load(v_ptr + row * v_stride + head * VALUE + column, column < VALUE, 0.0).to(tl.float32)
    state = state * tl.exp(tl.load(decay_ptr + row * decay_stride + head))
    correction = (v - tl.sum(state * k[:, None], axis=0)) * tl.load(beta_ptr + row * beta_stride + head)
    state += k[:, None] * correction[None, :]
    tl.store(at, state, there & is_live)
    y = tl.sum(state * q[:, None], axis=0)
    tl.store(out_ptr + (row * heads + head) * VALUE + column, y.to(out_ptr.dtype.element_ty), column < VALUE)


@triton.jit
def _delta_solve_kernel(
    k_ptr, decay_ptr, beta_ptr, inverse_ptr, piece_start_ptr, piece_length_ptr,
    k_stride, decay_stride, beta_stride, heads, each,
    KEY: tl.constexpr, KEY_WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """(1 + lower part of beta · k kᵀ · decay)⁻¹ of a piece, line by line: each needs those above it."""
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, start = tl.load(piece_length_ptr + piece), tl.load(piece_start_ptr + piece)
    if length == 0:
        return
    place, line = tl.arange(0, CHUNK), tl.arange(0, KEY_WIDTH)
    real, token = place < length, start + place
    decay = tl.load(decay_ptr + token * decay_stride + head, real, 0.0)
    beta = tl.load(beta_ptr + token * beta_stride + head, real, 0.0)
    k_at = k_ptr + (token * k_stride + (head // each) * KEY)[:, None] + line[None, :]
    k = _unit(tl.load(k_at, real[:, None] & (line < KEY)[None, :], 0.0).to(tl.float32), 1, EPS)
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
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    inverse_ptr, first_piece_ptr, query_start_ptr, first_row,
    q_stride, k_stride, v_stride, decay_stride, beta_stride, page_stride, pages_stride, heads, each, scale,
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
    state = tl.load(at, there & goes_on, 0.0)
    piece, group = tl.load(first_piece_ptr + row), head // each
    causal = place[:, None] >= place[None, :]
    for begin in range(0, length, CHUNK):
        token, real = start + begin + place, begin + place < length
        decay = tl.load(decay_ptr + token * decay_stride + head, real, 0.0)
        beta = tl.load(beta_ptr + token * beta_stride + head, real, 0.0)
        since, total = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
        of_keys, keys = (group * KEY + line)[None, :], real[:, None] & (line < KEY)[None, :]
        q = _unit(tl.load(q_ptr + (token * q_stride)[:, None] + of_keys, keys, 0.0).to(tl.float32), 1, EPS) * scale
        k = _unit(tl.load(k_ptr + (token * k_stride)[:, None] + of_keys, keys, 0.0).to(tl.float32), 1, EPS)
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
    tl.store(at, state, there & is_live)


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    rows: Rows,
    entry: int,
) -> torch.Tensor:
    """See `quire.kernels.recurrent.delta`."""
    heads, key, value = state.shape[1:]
    each, decodes, chunks = heads // q.shape[1], rows.num_decodes, rows.chunks
    # What is nobody's stays finite.
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if chunks is None else torch.zeros_like(v)
    pages = rows.pages[:, entry]
    tensors = (q, k, v, decay, beta, state, out, pages, rows.goes_on, rows.is_live)
    strides = (*(part.stride(0) for part in (q, k, v, decay, beta, state, pages)), heads, each, key**-0.5)
    if decodes:
        columns = min(_COLUMNS, next_power_of_2(value))
        _delta_decode_kernel[(decodes, heads, -(-value // columns))](
            *tensors, *strides, KEY=key, VALUE=value, KEY_WIDTH=next_power_of_2(key), COLUMNS=columns, EPS=EPS,
            num_warps=4,
        )  # fmt: skip
    if chunks is not None:
        exact, width = precision(v.dtype), dot_width(key)
        inverse = torch.empty(len(chunks.row), heads, CHUNK, CHUNK, dtype=torch.float32, device=v.device)
        _delta_solve_kernel[(len(chunks.row), heads)](
            k, decay, beta, inverse, chunks.start, chunks.length, k.stride(0), decay.stride(0), beta.stride(0), heads,
            each, KEY=key, KEY_WIDTH=width, CHUNK=CHUNK, PRECISION=exact, EPS=EPS, num_warps=4, num_stages=1,
        )  # fmt: skip
        columns = min(_COLUMNS, dot_width(value))
        _delta_prompt_kernel[(rows.num_rows - decodes, heads, -(-value // columns))](
            *tensors, inverse, chunks.first, rows.query_start, decodes, *strides, KEY=key, VALUE=value,
            KEY_WIDTH=width, COLUMNS=columns, CHUNK=CHUNK, PRECISION=exact, EPS=EPS, num_warps=4, num_stages=1,
        )  # fmt: skip
    return out
