"""Triton twins of `kernels/recurrent/conv.py`: a decode row's output and state in one kernel; of other rows first the
outputs, piece by piece, then the states."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.triton.parts import place_of

_DECODE_BLOCK, _BLOCK = 256, 64  # channels a program


@triton.jit
def _finish(total, bias_ptr, channel, there, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, there, 0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def _conv_decode_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    x_stride, page_stride, pages_stride, channels,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < channels
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    state = state_ptr + page * page_stride + channel * (TAPS - 1)
    x = tl.load(x_ptr + row * x_stride + channel, there, 0.0)
    total = x.to(tl.float32) * tl.load(weight_ptr + channel * TAPS + TAPS - 1, there, 0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(state + tap, there & goes_on, 0.0)
        total += old.to(tl.float32) * tl.load(weight_ptr + channel * TAPS + tap, there, 0.0).to(tl.float32)
        if tap > 0:
            tl.store(state + tap - 1, old, there & is_live)
    tl.store(state + TAPS - 2, x, there & is_live)
    y = _finish(total, bias_ptr, channel, there, HAS_BIAS, SILU)
    tl.store(out_ptr + row * channels + channel, y.to(out_ptr.dtype.element_ty), there)


@triton.jit
def _conv_prompt_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    piece_row_ptr, piece_start_ptr, piece_length_ptr, query_start_ptr,
    x_stride, page_stride, pages_stride, channels,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    length = tl.load(piece_length_ptr + piece)
    if length == 0:
        return
    row, start = tl.load(piece_row_ptr + piece), tl.load(piece_start_ptr + piece)
    page, goes_on, _ = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, CHUNK)
    there = (place < length)[:, None] & (channel < channels)[None, :]
    offset = start - tl.load(query_start_ptr + row) + place  # in the row
    state = state_ptr + page * page_stride + (channel * (TAPS - 1))[None, :]
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        inside = (offset + tap >= TAPS - 1)[:, None]
        at = x_ptr + ((start + place + tap - (TAPS - 1)) * x_stride)[:, None] + channel[None, :]
        value = tl.load(at, there & inside, 0.0).to(tl.float32)
        if tap < TAPS - 1:
            before = tl.load(state + (offset + tap)[:, None], there & (inside == 0) & goes_on, 0.0)
            value += before.to(tl.float32)
        weight = tl.load(weight_ptr + channel * TAPS + tap, channel < channels, 0.0).to(tl.float32)
        total += value * weight[None, :]
    y = _finish(total, bias_ptr, channel[None, :], channel[None, :] < channels, HAS_BIAS, SILU)
    at = out_ptr + ((start + place) * channels)[:, None] + channel[None, :]
    tl.store(at, y.to(out_ptr.dtype.element_ty), there)


@triton.jit(do_not_specialize=["first_row"])
def _conv_state_kernel(
    x_ptr, state_ptr, pages_ptr, goes_on_ptr, is_live_ptr, query_start_ptr,
    first_row, x_stride, page_stride, pages_stride, channels, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (first_row + tl.program_id(0)).to(tl.int64)
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    if not is_live:
        return
    start = tl.load(query_start_ptr + row).to(tl.int64)
    length = tl.load(query_start_ptr + row + 1) - start
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = channel < channels
    state = state_ptr + page * page_stride + channel * (TAPS - 1)
    for place in tl.static_range(TAPS - 1):
        own = length - (TAPS - 1) + place  # below 0: one from before, which is not yet overwritten
        x = tl.load(x_ptr + (start + own) * x_stride + channel, there & (own >= 0), 0.0)
        old = tl.load(state + place + length, there & (own < 0) & goes_on, 0.0)
        tl.store(state + place, tl.where(own >= 0, x, old), there)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: Rows,
    entry: int,
    *,
    silu: bool,
) -> torch.Tensor:
    """See `quire.kernels.recurrent.conv`."""
    channels, taps = weight.shape
    decodes, chunks = rows.num_decodes, rows.chunks
    # What is nobody's stays finite.
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if chunks is None else torch.zeros_like(x)
    pages = rows.pages[:, entry]
    whose = (pages, rows.goes_on, rows.is_live)
    strides = (x.stride(0), state.stride(0), pages.stride(0), channels)
    told, weight = weight if bias is None else bias, weight.contiguous()
    kind = {"TAPS": taps, "HAS_BIAS": bias is not None, "SILU": silu}
    if decodes:
        _conv_decode_kernel[(decodes, -(-channels // _DECODE_BLOCK))](
            x, weight, told, state, out, *whose, *strides, **kind, BLOCK=_DECODE_BLOCK, num_warps=4
        )
    if chunks is not None:
        _conv_prompt_kernel[(len(chunks.row), -(-channels // _BLOCK))](
            x, weight, told, state, out, *whose, chunks.row, chunks.start, chunks.length, rows.query_start, *strides,
            **kind, CHUNK=CHUNK, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        _conv_state_kernel[(rows.num_rows - decodes, -(-channels // _DECODE_BLOCK))](
            x, state, *whose, rows.query_start, decodes, *strides, TAPS=taps, BLOCK=_DECODE_BLOCK, num_warps=4
        )
    return out
