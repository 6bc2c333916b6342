"""One program a row that finds the row's cut (top-k, top-p, min-p) and draws above it."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.sampling_state import Column
from quire.kernels.triton.sampling_cut import cut_in_memory, exact_cut, first_cut, shortlist, weigh
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
_SHORT = tl.constexpr(1024)  # candidates of a usual row fit here: eight times less to search than a whole list


@triton.jit
def _draw_from_list(row, short, count, top_k, top_p, total, u, TILE: tl.constexpr):
    """A token of the short list, cut exactly. total: the mass that top_p is a part of; 0: that of the list."""
    _, _, top, inv_temperature = row
    _, short_logits, short_ids = short
    i = tl.arange(0, TILE)
    x = tl.load(short_logits + i, mask=i < count, other=-_INF)
    weights = tl.exp((x - top) * inv_temperature)
    if top_k > 0:
        cut = exact_cut(x, tl.where(x > -_INF, 1.0, 0.0), top_k.to(tl.float32))
        weights = tl.where(x >= cut, weights, 0.0)
    if top_p < 1:
        cut = exact_cut(x, weights, top_p * tl.where(total > 0, total, tl.sum(weights, 0)))
        weights = tl.where(x >= cut, weights, 0.0)
    place, _ = draw(weights, i, u * tl.sum(weights, 0))
    return tl.load(short_ids + place, mask=place < count, other=0)  # a row without any candidate: token 0


@triton.jit
def _draw_in_memory(
    row,
    groups,
    short,
    cut,
    count,
    top_k,
    top_p,
    total,
    u,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    SHORTLIST: tl.constexpr,
):
    """Like `_draw_from_list` for a row with more candidates (`count` at or above `cut`) than a list holds."""
    logits, vocab, top, inv_temperature = row
    if top_k > 0:
        target = top_k.to(tl.float32)
        cut = cut_in_memory(row, groups, short, cut, count, True, target, GROUPS, GROUP, SHORTLIST)
    if top_p < 1:
        count, mass = weigh(row, cut, SHORTLIST)
        target = top_p * tl.where(total > 0, total, mass)
        cut = cut_in_memory(row, groups, short, cut, count, False, target, GROUPS, GROUP, SHORTLIST)
    tile = tl.arange(0, TILES)
    masses = tl.zeros([TILES], tl.float32)
    for start in range(0, vocab, SHORTLIST):
        x = load_logits(logits, start + tl.arange(0, SHORTLIST), vocab)
        mass = tl.sum(tl.where(x >= cut, tl.exp((x - top) * inv_temperature), 0.0), 0)
        masses = tl.where(tile * SHORTLIST == start, mass, masses)
    return draw_from_row(logits, vocab, masses, top, inv_temperature, cut, u, TILES, SHORTLIST)


@triton.jit(do_not_specialize_on_alignment=["seats", "lengths", "out"])
def pick_filtered(
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
    num_groups,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    SHORTLIST: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + number)
    column = columns + seat * _WIDTH
    inv_temperature = load_float(column + _INV_TEMPERATURE)
    token = 0
    if (seat != 0) & (inv_temperature > 0):
        top_k = tl.load(column + _TOP_K)
        top_p = load_float(column + _TOP_P)
        min_p_cut = load_float(column + _MIN_P_CUT)
        u = uniform(column, tl.load(lengths + number))
        top, chunk_masses = load_chunks(number, chunks, chunk_max, chunk_sum, inv_temperature, CHUNKS)
        row = (logits + number * stride, vocab, top, inv_temperature)
        if (top_k == 0) & (top_p >= 1) & (min_p_cut == -_INF):
            token = draw_from_row(row[0], vocab, chunk_masses, top, inv_temperature, -_INF, u, CHUNKS, CHUNK)
        else:
            groups = (group_max + number * num_groups, num_groups)
            short = (
                short_groups + number * num_groups,
                short_logits + number * SHORTLIST,
                short_ids + number * SHORTLIST,
            )
            cut = top + min_p_cut
            # top-p is a part of all mass, unless another cut comes first: then of what that leaves, known later.
            total = tl.where((top_k == 0) & (min_p_cut == -_INF), tl.sum(chunk_masses, 0), 0.0)
            if (top_k > 0) | (total > 0):
                group = tl.arange(0, GROUPS)
                sums = group_sum + number * num_groups + group
                scales = chunk_max + number * chunks + group // (CHUNK // GROUP)
                target = tl.where(top_k > 0, top_k.to(tl.float32), top_p * total)
                cut = tl.maximum(cut, first_cut(row, groups, sums, scales, top_k > 0, target, GROUPS, GROUP))
            count = shortlist(row, groups, short, cut, _INF, GROUPS, GROUP, SHORTLIST)
            if count <= _SHORT:
                token = _draw_from_list(row, short, count, top_k, top_p, total, u, _SHORT)
            elif count <= SHORTLIST:
                token = _draw_from_list(row, short, count, top_k, top_p, total, u, SHORTLIST)
            else:
                token = _draw_in_memory(
                    row, groups, short, cut, count, top_k, top_p, total, u, GROUPS, GROUP, TILES, SHORTLIST
                )
    elif seat != 0:
        token = greedy(number, chunks, chunk_max, chunk_argmax, CHUNKS)
    tl.store(out + number, token)
