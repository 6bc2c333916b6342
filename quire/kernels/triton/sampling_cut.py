"""The cut of top-k, top-p and min-p: the logit below which a row's tokens are dropped.

A cut is the largest t for which the tokens at or above t are enough: k of them, or so many that they hold p of the
mass. Enough is monotone in t, so t is built bit by bit from the top, in the order of the floats: 32 exact steps.
A cheap lower bound of the cut comes from groups of 64 tokens (`first_cut`); the tokens above the bound are copied to
a short list (a few dozen for a usual top-k, a few thousand for a usual top-p) and the exact search runs in registers.
Only a row whose list overflows is searched in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.sampling_draw import load_logits

_INF = tl.constexpr(float("inf"))
_NONE = tl.constexpr(-(1 << 31))  # key before any bit is set: no cut found
_TOP_BIT = tl.constexpr(1 << 31)


@triton.jit
def _value(key):
    """The float32 of an int64 key in [-2**31, 2**31); keys are in the order of the floats."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _found(key):
    return tl.where(key > _NONE, _value(key), -_INF)


@triton.jit
def first_cut(
    row,
    chunks,
    groups,
    chunk_max,
    group_max,
    group_sum,
    top,
    inv_temperature,
    by_count,
    target,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A lower bound of the cut at which `target` tokens (if `by_count`) or that much mass are left; -inf if none.

    If `target` groups have a maximum of at least t, then as many tokens have. And a group with such a maximum holds
    at least the mass of it, and at least all its mass but that of GROUP - 1 tokens just below t.
    """
    group = tl.arange(0, GROUPS)
    there = group < groups
    maxima = tl.load(group_max + row * groups + group, mask=there, other=-_INF)
    scale = tl.load(chunk_max + row * chunks + group // (CHUNK // GROUP), mask=there, other=-_INF)
    sums = tl.load(group_sum + row * groups + group, mask=there, other=0.0)
    sums = sums * tl.exp((scale - top) * inv_temperature)
    best = tl.exp((maxima - top) * inv_temperature)
    key = tl.full([], _NONE, tl.int64)
    bit = tl.full([], _TOP_BIT, tl.int64)
    for _ in range(32):
        trial = _value(key + bit)
        below = (GROUP - 1) * tl.exp((trial - top) * inv_temperature)
        weights = tl.where(by_count, 1.0, tl.maximum(best, sums - below))
        enough = tl.sum(tl.where(maxima >= trial, weights, 0.0), 0) >= target
        key = tl.where(enough, key + bit, key)
        bit = bit >> 1
    return _found(key)


@triton.jit
def shortlist(
    logits_row,
    vocab,
    row,
    groups,
    group_max,
    short_groups,
    short_logits,
    short_ids,
    cut,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SHORTLIST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy the tokens at or above `cut`, in rising order, while there is room. Returns how many there are.

    Counting stops after the tile that overflows: more than SHORTLIST means just that.
    """
    group = tl.arange(0, GROUPS)
    maxima = tl.load(group_max + row * groups + group, mask=group < groups, other=-_INF)
    live = (maxima >= cut) & (maxima > -_INF)
    place = tl.cumsum(live.to(tl.int32), 0) - 1
    tl.store(short_groups + row * groups + place, group, mask=live)
    num_groups = tl.sum(live.to(tl.int32), 0)
    tl.debug_barrier()  # the list is read by other threads than those that wrote it
    count = num_groups * 0
    for start in range(0, num_groups * GROUP, TILE):
        i = start + tl.arange(0, TILE)
        there = i < num_groups * GROUP
        token = tl.load(short_groups + row * groups + i // GROUP, mask=there, other=0) * GROUP + i % GROUP
        x = load_logits(logits_row, tl.where(there, token, vocab), vocab)
        keep = (x >= cut) & (x > -_INF)
        place = count + tl.cumsum(keep.to(tl.int32), 0) - 1
        fits = keep & (place < SHORTLIST)
        tl.store(short_logits + row * SHORTLIST + place, x, mask=fits)
        tl.store(short_ids + row * SHORTLIST + place, token, mask=fits)
        count += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def exact_cut(x, weights, target):
    """The largest t for which the weights of x >= t sum to `target` or more; -inf if there is none."""
    key = tl.full([], _NONE, tl.int64)
    bit = tl.full([], _TOP_BIT, tl.int64)
    for _ in range(32):
        enough = tl.sum(tl.where(x >= _value(key + bit), weights, 0.0), 0) >= target
        key = tl.where(enough, key + bit, key)
        bit = bit >> 1
    return _found(key)


@triton.jit
def exact_cut_in_memory(logits_row, vocab, floor, top, inv_temperature, by_count, target, CHUNK: tl.constexpr):
    """`exact_cut` over the logits of a whole row from `floor` on; a token weighs 1 if `by_count`, else its mass."""
    key = tl.full([], _NONE, tl.int64)
    bit = tl.full([], _TOP_BIT, tl.int64)
    for _ in range(32):
        trial = _value(key + bit)
        sums = tl.zeros([CHUNK], tl.float32)
        for start in range(0, vocab, CHUNK):
            x = load_logits(logits_row, start + tl.arange(0, CHUNK), vocab)
            weights = tl.where(by_count, 1.0, tl.exp((x - top) * inv_temperature))
            sums += tl.where((x >= trial) & (x >= floor) & (x > -_INF), weights, 0.0)
        key = tl.where(tl.sum(sums, 0) >= target, key + bit, key)
        bit = bit >> 1
    return _found(key)


@triton.jit
def masses_above(logits_row, vocab, cut, top, inv_temperature, chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Mass of the tokens at or above `cut` in each chunk, [CHUNKS]."""
    masses = tl.zeros([CHUNKS], tl.float32)
    for chunk in range(chunks):
        x = load_logits(logits_row, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
        mass = tl.sum(tl.where(x >= cut, tl.exp((x - top) * inv_temperature), 0.0), 0)
        masses = tl.where(tl.arange(0, CHUNKS) == chunk, mass, masses)
    return masses
