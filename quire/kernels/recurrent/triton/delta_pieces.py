"""Triton kernels of the gated delta rule for rows of several tokens, with heads of 128 numbers of 16 bits, which fill
whole tiles. The triangular systems are solved first, piece by piece; then a program takes some columns of a head's
state from piece to piece, and writes down what they are before each; then all pieces' outputs are computed side by
side. What goes into products is rounded to the model's type, and added up in float32.

Heads of other sizes have the kernels of `delta.py`: padded to tiles, these came out wrong for bfloat16 on compute
capability 9.0 with Triton 3.6, which neither float32 nor the interpreter shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.triton.parts import blank, place_of, precision, softplus, stages
from quire.kernels.triton.launch import num_processors

if TYPE_CHECKING:
    from quire.kernels.recurrent.weights import DeltaWeights

_COLUMNS, _LEAST_COLUMNS, _OUTPUTS = 64, 32, 128  # of a head's state, a program
_SIZE = 128  # of a head's keys and values
EPS = 1e-6


def takes(v: torch.Tensor, state: torch.Tensor) -> bool:
    """See above."""
    return v.element_size() == 2 and state.shape[2:] == (_SIZE, _SIZE)


@triton.jit
def unit(x, axis: tl.constexpr, EPS: tl.constexpr):
    return x * tl.expand_dims(tl.rsqrt(tl.sum(x * x, axis=axis) + EPS), axis)


@triton.jit
def decay_of(a, head, a_log_ptr, dt_bias_ptr):
    return -tl.exp(tl.load(a_log_ptr + head)) * softplus(a.to(tl.float32) + tl.load(dt_bias_ptr + head))


@triton.jit
def told(a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, a_stride, b_stride, token, real, head, most):
    """Of a piece's tokens: the logarithm of what is kept from its beginning on, and how much each corrects."""
    decay = decay_of(tl.load(a_ptr + token * a_stride + head, real, 0.0), head, a_log_ptr, dt_bias_ptr)
    beta = most * tl.sigmoid(tl.load(b_ptr + token * b_stride + head, real, 0.0).to(tl.float32))
    return tl.where(real, decay, 0.0), beta


@triton.jit
def _inverse(system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + system)⁻¹ of a strictly lower triangle: blocks on the diagonal line by line, for each needs those above it.
    With those of D taken out, (1 + M) D, M has no more than three blocks below one another: (1 - M) (1 + M²) is
    the rest."""
    BLOCK: tl.constexpr = SIZE // 4
    place, number, line = tl.arange(0, SIZE), tl.arange(0, 4), tl.arange(0, BLOCK)
    same = (number[:, None] == number[None, :])[:, :, None, None]
    blocks = tl.permute(tl.reshape(system, [4, BLOCK, 4, BLOCK]), [0, 2, 1, 3])
    own = tl.sum(tl.where(same, blocks, 0.0), axis=1)
    found = tl.zeros_like(own) + tl.where(line[:, None] == line[None, :], 1.0, 0.0)[None]
    for i in range(1, BLOCK):
        is_next = (line == i)[None, :, None]
        weights = tl.sum(tl.where(is_next, own, 0.0), axis=1)
        above = tl.sum(weights[:, :, None] * found, axis=1)
        found -= tl.where(is_next, above[:, None, :], 0.0)
    spread = tl.where(same, found[:, None, :, :], 0.0)
    diagonal = tl.reshape(tl.permute(spread, [0, 2, 1, 3]), [SIZE, SIZE])
    below = tl.where((place // BLOCK)[:, None] != (place // BLOCK)[None, :], system, 0.0)
    rest = tl.dot(diagonal, below, input_precision=PRECISION)
    left = tl.where(place[:, None] == place[None, :], 1.0, 0.0) - rest
    left = tl.dot(left, tl.dot(rest, rest, input_precision=PRECISION), left, input_precision=PRECISION)
    return tl.dot(left, diagonal, input_precision=PRECISION)


@triton.jit
def _piece_solve_kernel(
    k_ptr, v_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, wanted_ptr, known_ptr, left_ptr, total_ptr,
    piece_start_ptr, piece_length_ptr, k_stride, v_stride, a_stride, b_stride, heads, each, most,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Of a piece: what (1 + lower part of beta · k kᵀ · decay)⁻¹ makes of the values, and of the keys by which the
    state before is known; and what is left of keys and of the state at the piece's end."""
    piece, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    length, start = tl.load(piece_length_ptr + piece), tl.load(piece_start_ptr + piece)
    if length == 0:
        return
    place, line, column = tl.arange(0, CHUNK), tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    real, token = place < length, start + place
    decay, beta = told(a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, a_stride, b_stride, token, real, head, most)
    keys, values = real[:, None] & (line < KEY)[None, :], real[:, None] & (column < VALUE)[None, :]
    k_at = k_ptr + (token * k_stride + (head // each) * KEY)[:, None] + line[None, :]
    k = unit(tl.load(k_at, keys, 0.0).to(tl.float32), 1, EPS)
    since, total = tl.cumsum(decay, axis=0), tl.sum(decay, axis=0)
    below = place[:, None] > place[None, :]
    pair = tl.exp(tl.where(below, since[:, None] - since[None, :], 0.0)) * beta[:, None]
    system = tl.where(below, tl.dot(k, tl.trans(k), input_precision=PRECISION) * pair, 0.0)
    inverse = _inverse(system, CHUNK, PRECISION)
    kind: tl.constexpr = wanted_ptr.dtype.element_ty
    v = tl.load(v_ptr + (token * v_stride + head * VALUE)[:, None] + column[None, :], values, 0.0).to(tl.float32)
    wanted = tl.dot(inverse.to(kind), (v * beta[:, None]).to(kind), input_precision=PRECISION)
    tl.store(wanted_ptr + ((token * heads + head) * VALUE)[:, None] + column[None, :], wanted.to(kind), values)
    known = tl.dot(inverse.to(kind), (k * (beta * tl.exp(since))[:, None]).to(kind), input_precision=PRECISION)
    out_at = ((token * heads + head) * KEY)[:, None] + line[None, :]
    tl.store(known_ptr + out_at, known.to(kind), keys)
    tl.store(left_ptr + out_at, (k * tl.exp(total - since)[:, None]).to(kind), keys)
    tl.store(total_ptr + piece * heads + head, tl.exp(total))


@triton.jit(do_not_specialize=["first_row"])
def _piece_states_kernel(
    wanted_ptr, known_ptr, left_ptr, total_ptr, state_ptr, before_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    query_start_ptr, first_piece_ptr, first_row, page_stride, pages_stride, heads,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From piece to piece of a row: what the state is before each is written down, and in place of what was wanted what
    each token corrects."""
    row, head = (first_row + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    start = tl.load(query_start_ptr + row).to(tl.int64)
    length = (tl.load(query_start_ptr + row + 1) - start).to(tl.int32)
    if length == 0:
        return
    line, column = tl.arange(0, KEY_WIDTH), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, CHUNK)
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    there = (line < KEY)[:, None] & (column < VALUE)[None, :]
    within = (head * KEY + line)[:, None] * VALUE + column[None, :]
    state = tl.load(state_ptr + page * page_stride + within, there & goes_on, 0.0).to(tl.float32)
    kind: tl.constexpr = wanted_ptr.dtype.element_ty
    piece = tl.load(first_piece_ptr + row)
    before_at = before_ptr + piece * heads * KEY * VALUE + within
    total_at = total_ptr + piece * heads + head
    for begin in tl.range(0, length, CHUNK, num_stages=STAGES):
        narrow = state.to(kind)
        tl.store(before_at, narrow, there)
        before_at += heads * KEY * VALUE
        token, real = start + begin + place, begin + place < length
        keys, values = real[:, None] & (line < KEY)[None, :], real[:, None] & (column < VALUE)[None, :]
        of_keys = ((token * heads + head) * KEY)[:, None] + line[None, :]
        known, left = tl.load(known_ptr + of_keys, keys, 0.0), tl.load(left_ptr + of_keys, keys, 0.0)
        at = wanted_ptr + ((token * heads + head) * VALUE)[:, None] + column[None, :]
        wanted = tl.load(at, values, 0.0).to(tl.float32)
        correction = (wanted - tl.dot(known, narrow, input_precision=PRECISION)).to(kind)
        tl.store(at, correction, values)
        state = tl.dot(tl.trans(left), correction, state * tl.load(total_at), input_precision=PRECISION)
        total_at += heads
    at = state_ptr + page * page_stride + within
    tl.store(at, state.to(state_ptr.dtype.element_ty), there & is_live)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _piece_outputs_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, correction_ptr, before_ptr, out_ptr, piece_start_ptr,
    piece_length_ptr, first_piece_ptr, query_start_ptr, num_rows, num_tokens,
    q_stride, k_stride, a_stride, b_stride, heads, each, scale, most,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Of one piece: what its own tokens' corrections and the state before it make."""
    piece, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    length, start = tl.load(piece_length_ptr + piece), tl.load(piece_start_ptr + piece)
    line, column = tl.arange(0, KEY_WIDTH), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if length == 0:
        of_head, there = head * VALUE + column, column < VALUE
        blank(
            out_ptr, heads * VALUE, of_head, there, piece, first_piece_ptr, query_start_ptr, num_rows, num_tokens, CHUNK
        )
        return
    place, group = tl.arange(0, CHUNK), head // each
    token, real = start + place, place < length
    keys, values = real[:, None] & (line < KEY)[None, :], real[:, None] & (column < VALUE)[None, :]
    kind: tl.constexpr = correction_ptr.dtype.element_ty
    decay, _ = told(a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, a_stride, b_stride, token, real, head, most)
    since = tl.cumsum(decay, axis=0)
    of_keys = (group * KEY + line)[None, :]
    q = unit(tl.load(q_ptr + (token * q_stride)[:, None] + of_keys, keys, 0.0).to(tl.float32), 1, EPS) * scale
    k = unit(tl.load(k_ptr + (token * k_stride)[:, None] + of_keys, keys, 0.0).to(tl.float32), 1, EPS)
    before_at = (piece * heads + head) * KEY * VALUE + line[:, None] * VALUE + column[None, :]
    before = tl.load(before_ptr + before_at, (line < KEY)[:, None] & (column < VALUE)[None, :], 0.0)
    out_at = ((token * heads + head) * VALUE)[:, None] + column[None, :]
    correction = tl.load(correction_ptr + out_at, values, 0.0)
    causal = place[:, None] >= place[None, :]
    pair = tl.exp(tl.where(causal, since[:, None] - since[None, :], 0.0))
    scores = tl.dot(q.to(kind), tl.trans(k.to(kind)), input_precision=PRECISION)
    scores = tl.where(causal, scores * pair, 0.0).to(kind)
    y = tl.dot((q * tl.exp(since)[:, None]).to(kind), before, input_precision=PRECISION)
    y = tl.dot(scores, correction, y, input_precision=PRECISION)
    tl.store(out_ptr + out_at, y.to(out_ptr.dtype.element_ty), values)


def pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: DeltaWeights,
    state: torch.Tensor,
    out: torch.Tensor,
    rows: Rows,
    entry: int,
) -> None:
    """Rows that are not decodes, and the padding behind them, of `quire.kernels.recurrent.delta.gated_delta`."""
    heads, key, value = state.shape[1:]
    each, decodes, chunks, own = heads // q.shape[1], rows.num_decodes, rows.chunks, (weights.a_log, weights.dt_bias)
    assert chunks is not None
    pages = rows.pages[:, entry]
    number = len(chunks.row)
    others, most = rows.num_rows - decodes, weights.most
    fills = others * heads * -(-value // _COLUMNS) >= num_processors(v.device)
    columns, tile = _COLUMNS if fills else _LEAST_COLUMNS, CHUNK * v.element_size()
    of_state = key * columns * v.element_size()
    ahead = stages(v.device, tile * (2 * key + columns), of_state + tile * columns)
    wanted = torch.empty(len(v), heads, value, dtype=v.dtype, device=v.device)
    known, left = torch.empty(2, len(v), heads, key, dtype=v.dtype, device=v.device)
    total = torch.empty(number, heads, dtype=torch.float32, device=v.device)
    before = torch.empty(number, heads, key, value, dtype=v.dtype, device=v.device)
    sizes = {
        "KEY": key, "VALUE": value, "KEY_WIDTH": key, "CHUNK": CHUNK, "PRECISION": precision(v.dtype),
    }  # fmt: skip
    _piece_solve_kernel[(heads, number)](
        k, v, a, b, *own, wanted, known, left, total, chunks.start, chunks.length,
        *(part.stride(0) for part in (k, v, a, b)), heads, each, most, **sizes, VALUE_WIDTH=value, EPS=EPS,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    _piece_states_kernel[(others, heads, -(-value // columns))](
        wanted, known, left, total, state, before, pages, rows.goes_on, rows.is_live, rows.query_start,
        chunks.first, decodes, state.stride(0), pages.stride(0), heads, **sizes, COLUMNS=columns, STAGES=ahead,
        num_warps=4,
    )  # fmt: skip
    columns = _OUTPUTS
    _piece_outputs_kernel[(heads, number, -(-value // columns))](
        q, k, a, b, *own, wanted, before, out, chunks.start, chunks.length,
        chunks.first, rows.query_start, rows.num_rows, len(v), *(part.stride(0) for part in (q, k, a, b)), heads,
        each, key**-0.5, most, **sizes, COLUMNS=columns, EPS=EPS,
        num_warps=4, num_stages=1,
    )  # fmt: skip
