"""One program a row that finds the row's cut (top-k, top-p, min-p) and draws above it."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.sampling.state import Column
from quire.kernels.sampling.triton.cut import exact_cut, first_cut, keep_few, list_range, narrow, next_up, shortlist
from quire.kernels.sampling.triton.draw import draw, greedy, load_chunks, load_float, load_logits, uniform

_WIDTH = tl.constexpr(len(Column))
_INV_TEMPERATURE = tl.constexpr(int(Column.INV_TEMPERATURE))
_TOP_K = tl.constexpr(int(Column.TOP_K))
_TOP_P = tl.constexpr(int(Column.TOP_P))
_MIN_P_CUT = tl.constexpr(int(Column.MIN_P_CUT))
_INF = tl.constexpr(float("inf"))
_FEW = tl.constexpr(128)  # candidates that are all compared with each other: enough for a usual top-k


@triton.jit
def _tile_masses(
    values, count, cut, top, inv_temperature, TILES: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr
):
    """[TILES]: the mass of the logits of at least `cut` in each tile of `values`."""
    masses = tl.zeros([TILES], tl.float32)
    tile = tl.arange(0, TILES)
    for start in tl.range(0, count, TILE, num_stages=STAGES):
        x = load_logits(values, start + tl.arange(0, TILE), count)
        mass = tl.sum(tl.where(x >= cut, tl.exp((x - top) * inv_temperature), 0.0), 0)
        masses = tl.where(tile * TILE == start, mass, masses)
    return masses


@triton.jit
def _draw_few(row, short, count, top_k, top_p, total, u):
    """A token of a list of at most _FEW; token 0 if there is no candidate at all."""
    _, _, top, inv_temperature = row
    i = tl.arange(0, _FEW)
    x = tl.load(short[1] + i, mask=i < count, other=-_INF)
    weights = keep_few(x, tl.exp((x - top) * inv_temperature), top_k, top_p, total)
    place, _ = draw(weights, i, u * tl.sum(weights, 0))
    return tl.load(short[2] + place, mask=place < count, other=0)


@triton.jit(do_not_specialize_on_alignment=["seats", "lengths", "out"])
def pick_filtered(
    logits,
    columns,
    seats,
    lengths,
    chunk_max,
    chunk_min,
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
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    SHORTLIST: tl.constexpr,
    TILE: tl.constexpr,
    PASS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
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
        top, masses = load_chunks(number, chunks, chunk_max, chunk_sum, inv_temperature, CHUNKS)
        row = (logits + number * stride, vocab, top, inv_temperature)
        short = (
            short_groups + number * num_groups,
            short_logits + number * SHORTLIST,
            short_ids + number * SHORTLIST,
        )
        values, count, listed = row[0], vocab, 0  # where the tokens to draw from are
        cut = top + min_p_cut
        stage = 0
        if (top_k > 0) | (top_p < 1) | (min_p_cut > -_INF):
            groups = (group_max + number * num_groups, num_groups)
            # top-p is a part of all mass, unless another cut comes first: then of what that leaves, known later.
            total = tl.where((top_k == 0) & (min_p_cut == -_INF), tl.sum(masses, 0), 0.0)
            if (top_k > 0) | (total > 0):
                group = tl.arange(0, GROUPS)
                sums = group_sum + number * num_groups + group
                scales = chunk_max + number * chunks + group // (CHUNK // GROUP)
                enough = (top_k > 0, tl.where(top_k > 0, top_k.to(tl.float32), top_p * total))
                cut = tl.maximum(cut, first_cut(row, groups, sums, scales, enough, GROUPS, GROUP))
            chunk = tl.arange(0, CHUNKS)
            lowest = tl.min(tl.load(chunk_min + number * chunks + chunk, mask=chunk < chunks, other=_INF), 0)
            cut = tl.maximum(cut, tl.minimum(lowest, top))
            untried = True  # whether the tokens at or above the cut may fit the list
            while stage < 3:  # top-k, then top-p of what that leaves, then the masses to draw by
                if (listed == 0) & untried:
                    num_short = shortlist(row, groups, short, cut, GROUPS, GROUP, SHORTLIST, TILE)
                    if num_short <= SHORTLIST:
                        values, count, listed = short[1], num_short, 1
                    untried = False
                if (stage == 0) & (listed == 1) & (count <= _FEW):
                    token = _draw_few(row, short, count, top_k, top_p, total, u)
                    stage = 4
                searches = ((stage == 0) & (top_k > 0)) | ((stage == 1) & (top_p < 1))
                if (stage == 2) | (searches & (stage == 1) & (total == 0)):
                    masses = _tile_masses(values, count, cut, top, inv_temperature, CHUNKS, CHUNK, STAGES)
                    total = tl.sum(masses, 0)
                if searches:
                    enough = (stage == 0, tl.where(stage == 0, top_k.to(tl.float32), top_p * total))
                    high = next_up(top)
                    within = tl.where(stage == 0, vocab.to(tl.float32), total)
                    above = top * 0
                    num_short = tl.where(listed == 1, count, SHORTLIST + 1)
                    divisible = True
                    while (num_short > SHORTLIST) & divisible:
                        cut, high, within, above = narrow(row, cut, high, within, above, enough, PASS, PARTS, STAGES)
                        least = tl.where(stage == 0, 1.0, tl.exp((cut - top) * inv_temperature))
                        if within - above <= SHORTLIST * least:
                            num_short = list_range(row, short, cut, high, SHORTLIST, TILE, STAGES)
                        divisible = next_up(cut) < high
                        untried = True
                    if num_short <= SHORTLIST:
                        exact = exact_cut(row, short, num_short, cut, high, above, enough, TILE)
                        cut = tl.maximum(cut, exact)
                stage += 1
        if stage <= 3:  # not drawn yet
            tile, rest = draw(masses, tl.arange(0, CHUNKS), u * tl.sum(masses, 0))
            place = tile * CHUNK + tl.arange(0, CHUNK)
            x = load_logits(values, place, count)
            token, _ = draw(tl.where(x >= cut, tl.exp((x - top) * inv_temperature), 0.0), place, rest)
            if listed == 1:
                token = tl.load(short[2] + token, mask=token < count, other=0)
    elif seat != 0:
        token = greedy(number, chunks, chunk_max, chunk_argmax, CHUNKS)
    tl.store(out + number, token)
