"""Triton twins of `kernels/recurrent/selective.py`: some channels of a row a program, token by token, their states in
registers. Where rows are too few to fill the device, pieces of them are gone through side by side, twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.triton.parts import place_of, softplus
from quire.kernels.triton.launch import has_pdl, next_power_of_2, num_processors

if TYPE_CHECKING:
    from quire.kernels.recurrent.weights import SelectiveWeights

_CHANNELS = 64  # a program
_PROGRAMS = 4  # a processor, that rows must make to be gone through whole
_STAGES = 3  # tokens whose inputs are on their way


@triton.jit
def _walk(
    state, a, d, start, end, x_ptr, dt_ptr, b_ptr, c_ptr, out_ptr, x_stride, dt_stride, b_stride, c_stride, channels,
    channel, column,
    STATE: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From token to token: the state behind the last, and the sum of the steps in time."""
    inside, total = channel < channels, tl.zeros_like(d)
    for token in tl.range(start, end, num_stages=STAGES):
        x = tl.load(x_ptr + token * x_stride + channel, inside, 0.0).to(tl.float32)
        dt = softplus(tl.load(dt_ptr + token * dt_stride + channel, inside, 0.0).to(tl.float32))
        b = tl.load(b_ptr + token * b_stride + column, column < STATE, 0.0).to(tl.float32)
        state = state * tl.exp(dt[:, None] * a) + (dt * x)[:, None] * b[None, :]
        total += dt
        if OUTPUTS:
            c = tl.load(c_ptr + token * c_stride + column, column < STATE, 0.0).to(tl.float32)
            y = tl.sum(state * c[None, :], axis=1) + d * x
            tl.store(out_ptr + token * channels + channel, y.to(out_ptr.dtype.element_ty), inside)
    return state, total


@triton.jit
def _selective_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, a_log_ptr, d_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    query_start_ptr, x_stride, dt_stride, b_stride, c_stride, page_stride, pages_stride, channels,
    STATE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    start, end = tl.load(query_start_ptr + row).to(tl.int64), tl.load(query_start_ptr + row + 1).to(tl.int64)
    if start == end:
        return
    channel, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    there = (channel < channels)[:, None] & (column < STATE)[None, :]
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    within = channel[:, None] * STATE + column[None, :]
    at = state_ptr + page * page_stride + within
    state = tl.load(at, there & goes_on, 0.0).to(tl.float32)  # of a step before, and so ahead of the wait
    a = -tl.exp(tl.load(a_log_ptr + within, there, 0.0))
    d = tl.load(d_ptr + channel, channel < channels, 0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    state, _ = _walk(
        state, a, d, start, end, x_ptr, dt_ptr, b_ptr, c_ptr, out_ptr, x_stride, dt_stride, b_stride, c_stride,
        channels, channel, column, STATE, True, STAGES,
    )  # fmt: skip
    tl.store(at, state.to(state_ptr.dtype.element_ty), there & is_live)


@triton.jit
def _selective_piece_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, a_log_ptr, d_ptr, before_ptr, total_ptr, out_ptr, piece_start_ptr, piece_length_ptr,
    x_stride, dt_stride, b_stride, c_stride, channels,
    STATE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Of one piece: what it adds to the state, or, from the state before it, what comes out."""
    piece = tl.program_id(1).to(tl.int64)
    start, length = tl.load(piece_start_ptr + piece), tl.load(piece_length_ptr + piece)
    if length == 0:
        return
    channel, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside = channel < channels
    there = inside[:, None] & (column < STATE)[None, :]
    within = channel[:, None] * STATE + column[None, :]
    a = -tl.exp(tl.load(a_log_ptr + within, there, 0.0))
    d = tl.load(d_ptr + channel, inside, 0.0)
    at = before_ptr + piece * channels * STATE + within
    state = tl.load(at, there, 0.0) if OUTPUTS else tl.zeros_like(a)
    state, total = _walk(
        state, a, d, start, start + length, x_ptr, dt_ptr, b_ptr, c_ptr, out_ptr, x_stride, dt_stride, b_stride,
        c_stride, channels, channel, column, STATE, OUTPUTS, STAGES,
    )  # fmt: skip
    if not OUTPUTS:
        tl.store(at, state, there)
        tl.store(total_ptr + piece * channels + channel, total, inside)


@triton.jit(do_not_specialize=["first_row"])
def _selective_states_kernel(
    a_log_ptr, before_ptr, total_ptr, state_ptr, pages_ptr, goes_on_ptr, is_live_ptr, first_piece_ptr, first_row,
    page_stride, pages_stride, channels,
    STATE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From piece to piece of a row: in place of what each adds, what the state is before it."""
    row = (first_row + tl.program_id(1)).to(tl.int64)
    channel, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    there = (channel < channels)[:, None] & (column < STATE)[None, :]
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    within = channel[:, None] * STATE + column[None, :]
    at = state_ptr + page * page_stride + within
    state = tl.load(at, there & goes_on, 0.0).to(tl.float32)
    a = -tl.exp(tl.load(a_log_ptr + within, there, 0.0))
    for piece in tl.range(tl.load(first_piece_ptr + row), tl.load(first_piece_ptr + row + 1), num_stages=STAGES):
        before_at = before_ptr + piece * channels * STATE + within
        added = tl.load(before_at, there, 0.0)
        total = tl.load(total_ptr + piece * channels + channel, channel < channels, 0.0)
        tl.store(before_at, state, there)
        state = state * tl.exp(total[:, None] * a) + added
    tl.store(at, state.to(state_ptr.dtype.element_ty), there & is_live)


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
    chunks, whole, blocks = rows.chunks, rows.num_rows, -(-channels // _CHANNELS)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if chunks is not None:
        out.zero_()  # what is nobody's stays finite
        others = whole - rows.num_decodes
        if rows.max_query_len > CHUNK and others * blocks < _PROGRAMS * num_processors(x.device):
            whole = rows.num_decodes
    pages, pdl, own = rows.pages[:, entry], has_pdl(x.device), (weights.a_log, weights.d)
    strides = tuple(part.stride(0) for part in (x, dt, b, c))
    sizes = {"STATE": size, "WIDTH": next_power_of_2(size), "BLOCK": _CHANNELS, "STAGES": _STAGES, "num_warps": 4}
    if whole:
        _selective_kernel[(blocks, whole)](
            x, dt, b, c, *own, state, out, pages, rows.goes_on, rows.is_live, rows.query_start, *strides,
            state.stride(0), pages.stride(0), channels, **sizes, PDL=pdl, launch_pdl=pdl,
        )  # fmt: skip
    if chunks is not None and whole < rows.num_rows:
        pieces = len(chunks.row)
        before = torch.empty(pieces, channels, size, dtype=torch.float32, device=x.device)
        total = torch.empty(pieces, channels, dtype=torch.float32, device=x.device)
        given = (x, dt, b, c, *own, before, total, out, chunks.start, chunks.length, *strides, channels)
        _selective_piece_kernel[(blocks, pieces)](*given, **sizes, OUTPUTS=False)
        _selective_states_kernel[(blocks, rows.num_rows - whole)](
            weights.a_log, before, total, state, pages, rows.goes_on, rows.is_live, chunks.first, whole,
            state.stride(0), pages.stride(0), channels, **sizes,
        )  # fmt: skip
        _selective_piece_kernel[(blocks, pieces)](*given, **sizes, OUTPUTS=True)
    return out
