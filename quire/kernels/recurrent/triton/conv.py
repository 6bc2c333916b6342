"""Triton twins of `kernels/recurrent/conv.py`: a decode row's output and state in one kernel; of other rows first the
outputs, piece by piece, then the states."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.triton.parts import blank, place_of
from quire.kernels.triton.launch import has_pdl, next_power_of_2

_DECODE_BLOCK, _BLOCK = 512, 64  # channels a program


@triton.jit
def _weights(weight_ptr, channel, there, TAPS: tl.constexpr, WIDTH: tl.constexpr):
    """Of all taps, which lie side by side: [channels, WIDTH], to be read at once."""
    tap = tl.arange(0, WIDTH)
    at = weight_ptr + channel[:, None] * TAPS + tap[None, :]
    return tl.load(at, there[:, None] & (tap < TAPS)[None, :], 0.0).to(tl.float32)


@triton.jit
def _one(weights, tap: tl.constexpr, WIDTH: tl.constexpr):
    return tl.sum(tl.where((tl.arange(0, WIDTH) == tap)[None, :], weights, 0.0), axis=1)


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
    TAPS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = channel < channels
    page, goes_on, is_live = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    state = state_ptr + page * page_stride + channel
    weights = _weights(weight_ptr, channel, there, TAPS, WIDTH)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS - 1):  # of steps before, and so ahead of the wait
        old = tl.load(state + tap * channels, there & goes_on, 0.0)
        total += old.to(tl.float32) * _one(weights, tap, WIDTH)
        if tap > 0:
            tl.store(state + (tap - 1) * channels, old, there & is_live)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + channel, there, 0.0)
    total += x.to(tl.float32) * _one(weights, TAPS - 1, WIDTH)
    tl.store(state + (TAPS - 2) * channels, x, there & is_live)
    y = _finish(total, bias_ptr, channel, there, HAS_BIAS, SILU)
    tl.store(out_ptr + row * channels + channel, y.to(out_ptr.dtype.element_ty), there)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _conv_prompt_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, pages_ptr, goes_on_ptr, is_live_ptr,
    piece_row_ptr, piece_start_ptr, piece_length_ptr, first_piece_ptr, query_start_ptr, num_rows, num_tokens,
    x_stride, page_stride, pages_stride, channels,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    piece, channel = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(piece_length_ptr + piece)
    if length == 0:
        there = channel < channels
        blank(out_ptr, channels, channel, there, piece, first_piece_ptr, query_start_ptr, num_rows, num_tokens, CHUNK)
        return
    row, start = tl.load(piece_row_ptr + piece), tl.load(piece_start_ptr + piece)
    page, goes_on, _ = place_of(row, pages_ptr, pages_stride, goes_on_ptr, is_live_ptr)
    place, inside = tl.arange(0, CHUNK), channel < channels
    there = (place < length)[:, None] & inside[None, :]
    is_first = start == tl.load(query_start_ptr + row)
    x = x_ptr + ((start + place) * x_stride)[:, None] + channel[None, :]
    total, weights = tl.zeros([CHUNK, BLOCK], tl.float32), _weights(weight_ptr, channel, inside, TAPS, WIDTH)
    for tap in tl.static_range(TAPS):
        own = tl.where(is_first, place, CHUNK) >= TAPS - 1 - tap  # the row's
        value = tl.load(x - (TAPS - 1 - tap) * x_stride, there & own[:, None], 0.0).to(tl.float32)
        total += value * _one(weights, tap, WIDTH)[None, :]
    if is_first & goes_on:  # the first tokens see some from before
        for token in tl.static_range(TAPS - 1):
            seen = tl.zeros([BLOCK], tl.float32)
            for tap in tl.static_range(TAPS - 1 - token):
                before = tl.load(state_ptr + page * page_stride + (token + tap) * channels + channel, inside, 0.0)
                seen += before.to(tl.float32) * _one(weights, tap, WIDTH)
            total += tl.where((place == token)[:, None], seen[None, :], 0.0)
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
    state = state_ptr + page * page_stride + channel
    for place in tl.static_range(TAPS - 1):
        own = length - (TAPS - 1) + place  # below 0: one from before, which is not yet overwritten
        x = tl.load(x_ptr + (start + own) * x_stride + channel, there & (own >= 0), 0.0)
        old = tl.load(state + (place + length) * channels, there & (own < 0) & goes_on, 0.0)
        tl.store(state + place * channels, tl.where(own >= 0, x, old), there)


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
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pages = rows.pages[:, entry]
    whose = (pages, rows.goes_on, rows.is_live)
    strides = (x.stride(0), state.stride(0), pages.stride(0), channels)
    told, weight = weight if bias is None else bias, weight.contiguous()
    kind = {"TAPS": taps, "WIDTH": next_power_of_2(taps), "HAS_BIAS": bias is not None, "SILU": silu}
    if decodes:
        pdl = has_pdl(x.device)
        _conv_decode_kernel[(-(-channels // _DECODE_BLOCK), decodes)](
            x, weight, told, state, out, *whose, *strides, **kind, BLOCK=_DECODE_BLOCK, PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    if chunks is not None:
        _conv_prompt_kernel[(-(-channels // _BLOCK), len(chunks.row))](
            x, weight, told, state, out, *whose, chunks.row, chunks.start, chunks.length, chunks.first,
            rows.query_start, rows.num_rows, len(x), *strides, **kind, CHUNK=CHUNK, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        _conv_state_kernel[(rows.num_rows - decodes, -(-channels // _DECODE_BLOCK))](
            x, state, *whose, rows.query_start, decodes, *strides, TAPS=taps, BLOCK=_DECODE_BLOCK, num_warps=4
        )
    return out
