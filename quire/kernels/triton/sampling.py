"""Triton twins of `kernels/sampling.py`: `_chunk_stats` reads the logits once, then one program a row draws."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.sampling_state import CHUNK, GROUP, SHORTLIST, Column, Scratch
from quire.kernels.triton.sampling_cut import (
    exact_cut,
    exact_cut_in_memory,
    first_cut,
    masses_above,
    shortlist,
)
from quire.kernels.triton.sampling_draw import (
    draw,
    draw_from_row,
    greedy,
    load_chunks,
    load_float,
    load_logits,
    uniform,
)

_WIDTH = tl.constexpr(len(Column))
_INV_TEMPERATURE = tl.constexpr(int(Column.INV_TEMPERATURE))
_TOP_K = tl.constexpr(int(Column.TOP_K))
_TOP_P = tl.constexpr(int(Column.TOP_P))
_MIN_P_CUT = tl.constexpr(int(Column.MIN_P_CUT))
_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_SHORT = tl.constexpr(1024)  # candidates of a usual row fit here: eight times less to search than SHORTLIST

_STATS_WARPS, _PICK_WARPS, _FILTER_WARPS = 4, 8, 8

# Slices of a batch start anywhere: their alignment must not choose another compiled kernel.
_ANYWHERE = ["seats", "lengths", "out"]


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _chunk_stats(
    logits,
    columns,
    seats,
    chunk_max,
    chunk_argmax,
    chunk_sum,
    group_max,
    group_sum,
    stride,
    vocab,
    chunks,
    groups,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits + row * stride, tokens, vocab)  # first: nothing here has to be waited for
    seat = tl.load(seats + row)
    inv_temperature = load_float(columns + seat * _WIDTH + _INV_TEMPERATURE)
    if seat == 0:
        return
    top = tl.max(x, 0)
    tl.store(chunk_max + row * chunks + chunk, top)
    if inv_temperature > 0:
        weights = tl.exp((x - tl.maximum(top, -_LARGEST)) * inv_temperature)
        tl.store(chunk_sum + row * chunks + chunk, tl.sum(weights, 0))
        if FILTERED:
            group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
            there = group < groups
            maxima = tl.max(tl.reshape(x, [CHUNK // GROUP, GROUP]), 1)
            sums = tl.sum(tl.reshape(weights, [CHUNK // GROUP, GROUP]), 1)
            tl.store(group_max + row * groups + group, maxima, mask=there)
            tl.store(group_sum + row * groups + group, sums, mask=there)
    else:
        tl.store(chunk_argmax + row * chunks + chunk, tl.min(tl.where(x == top, tokens, 2147483647), 0))


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _pick(
    logits,
    columns,
    seats,
    lengths,
    chunk_max,
    chunk_argmax,
    chunk_sum,
    out,
    stride,
    vocab,
    chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    column = columns + seat * _WIDTH
    inv_temperature = load_float(column + _INV_TEMPERATURE)
    token = 0
    if seat != 0:
        if inv_temperature > 0:
            top, masses = load_chunks(row, chunks, chunk_max, chunk_sum, inv_temperature, CHUNKS)
            u = uniform(column, tl.load(lengths + row))
            token = draw_from_row(logits + row * stride, vocab, masses, top, inv_temperature, -_INF, u, CHUNKS, CHUNK)
        else:
            token = greedy(row, chunks, chunk_max, chunk_argmax, CHUNKS)
    tl.store(out + row, token)


@triton.jit
def _draw_from_list(
    short_logits,
    short_ids,
    count,
    top,
    inv_temperature,
    top_k,
    top_p,
    total,
    u,
    TILE: tl.constexpr,
):
    """A token of the short list, cut exactly. total: the mass that top_p is a part of, or 0: that of the list."""
    i = tl.arange(0, TILE)
    x = tl.load(short_logits + i, mask=i < count, other=-_INF)
    weights = tl.exp((x - top) * inv_temperature)
    if top_k > 0:
        cut = exact_cut(x, tl.where(x > -_INF, 1.0, 0.0), top_k.to(tl.float32))
        weights = tl.where(x >= cut, weights, 0.0)
    if top_p < 1:
        mass = tl.where(total > 0, total, tl.sum(weights, 0))
        cut = exact_cut(x, weights, top_p * mass)
        weights = tl.where(x >= cut, weights, 0.0)
    place, _ = draw(weights, i, u * tl.sum(weights, 0))
    return tl.load(short_ids + place, mask=place < count, other=0)  # a row without any candidate: token 0


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _pick_filtered(
    logits,
    columns,
    seats,
    lengths,
    chunk_max,
    chunk_argmax,
    chunk_sum,
    group_max,
    group_sum,
    short_groups,
    short_logits,
    short_ids,
    out,
    stride,
    vocab,
    chunks,
    groups,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    SHORTLIST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    column = columns + seat * _WIDTH
    inv_temperature = load_float(column + _INV_TEMPERATURE)
    logits_row = logits + row * stride
    top_k = tl.load(column + _TOP_K)
    top_p = load_float(column + _TOP_P)
    gap = load_float(column + _MIN_P_CUT)
    token = 0
    if seat != 0:
        if inv_temperature > 0:
            top, masses = load_chunks(row, chunks, chunk_max, chunk_sum, inv_temperature, CHUNKS)
            u = uniform(column, tl.load(lengths + row))
            if (top_k == 0) & (top_p >= 1) & (gap == -_INF):
                token = draw_from_row(logits_row, vocab, masses, top, inv_temperature, -_INF, u, CHUNKS, CHUNK)
            else:
                total = tl.where((top_k == 0) & (gap == -_INF), tl.sum(masses, 0), 0.0)  # 0: known after other cuts
                floor = top + gap
                cut = floor
                if (top_k > 0) | (total > 0):
                    target = tl.where(top_k > 0, top_k.to(tl.float32), top_p * total)
                    cut = tl.maximum(
                        cut,
                        first_cut(
                            row,
                            chunks,
                            groups,
                            chunk_max,
                            group_max,
                            group_sum,
                            top,
                            inv_temperature,
                            top_k > 0,
                            target,
                            GROUPS,
                            CHUNK,
                            GROUP,
                        ),
                    )
                count = shortlist(
                    logits_row,
                    vocab,
                    row,
                    groups,
                    group_max,
                    short_groups,
                    short_logits,
                    short_ids,
                    cut,
                    GROUPS,
                    GROUP,
                    SHORTLIST,
                    SHORTLIST,
                )
                short_logits += row * SHORTLIST
                short_ids += row * SHORTLIST
                if count <= _SHORT:
                    token = _draw_from_list(
                        short_logits, short_ids, count, top, inv_temperature, top_k, top_p, total, u, _SHORT
                    )
                elif count <= SHORTLIST:
                    token = _draw_from_list(
                        short_logits, short_ids, count, top, inv_temperature, top_k, top_p, total, u, SHORTLIST
                    )
                else:
                    cut = floor
                    if top_k > 0:
                        target = top_k.to(tl.float32)
                        cut = tl.maximum(
                            cut,
                            exact_cut_in_memory(logits_row, vocab, floor, top, inv_temperature, True, target, CHUNK),
                        )
                    masses = masses_above(logits_row, vocab, cut, top, inv_temperature, chunks, CHUNKS, CHUNK)
                    if top_p < 1:
                        target = top_p * tl.sum(masses, 0)
                        cut = tl.maximum(
                            cut,
                            exact_cut_in_memory(logits_row, vocab, cut, top, inv_temperature, False, target, CHUNK),
                        )
                        masses = masses_above(logits_row, vocab, cut, top, inv_temperature, chunks, CHUNKS, CHUNK)
                    token = draw_from_row(logits_row, vocab, masses, top, inv_temperature, cut, u, CHUNKS, CHUNK)
        else:
            token = greedy(row, chunks, chunk_max, chunk_argmax, CHUNKS)
    tl.store(out + row, token)


def sample(
    logits: torch.Tensor,
    columns: torch.Tensor,
    seats: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scratch: Scratch,
    *,
    filtered: bool,
) -> None:
    rows, vocab = logits.shape
    chunks, groups = scratch.chunk_max.shape[1], scratch.group_max.shape[1]
    _chunk_stats[(chunks, rows)](
        logits,
        columns,
        seats,
        scratch.chunk_max,
        scratch.chunk_argmax,
        scratch.chunk_sum,
        scratch.group_max,
        scratch.group_sum,
        logits.stride(0),
        vocab,
        chunks,
        groups,
        FILTERED=filtered,
        CHUNK=CHUNK,
        GROUP=GROUP,
        num_warps=_STATS_WARPS,
    )
    if filtered:
        _pick_filtered[(rows,)](
            logits,
            columns,
            seats,
            lengths,
            scratch.chunk_max,
            scratch.chunk_argmax,
            scratch.chunk_sum,
            scratch.group_max,
            scratch.group_sum,
            scratch.short_groups,
            scratch.short_logits,
            scratch.short_ids,
            out,
            logits.stride(0),
            vocab,
            chunks,
            groups,
            CHUNKS=triton.next_power_of_2(chunks),
            GROUPS=triton.next_power_of_2(groups),
            CHUNK=CHUNK,
            GROUP=GROUP,
            SHORTLIST=SHORTLIST,
            num_warps=_FILTER_WARPS,
        )
    else:
        _pick[(rows,)](
            logits,
            columns,
            seats,
            lengths,
            scratch.chunk_max,
            scratch.chunk_argmax,
            scratch.chunk_sum,
            out,
            logits.stride(0),
            vocab,
            chunks,
            CHUNKS=triton.next_power_of_2(chunks),
            CHUNK=CHUNK,
            num_warps=_PICK_WARPS,
        )
