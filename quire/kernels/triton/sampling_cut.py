"""The cut of top-k and top-p: the logit below which a row's tokens are dropped.

A cut is the largest t for which the tokens at or above t are enough: k of them, or so many that they hold p of the
mass. Enough is monotone in t, so t is built bit by bit from the top, in the order of the floats: 32 exact steps.
A cheap lower bound of the cut comes from groups of 64 tokens (`first_cut`); the tokens above the bound are copied to
a short list (a few dozen for a usual top-k, a few thousand for a usual top-p) and the exact search runs in registers.
Only for a row whose list overflows is the range first narrowed by passes over the whole row.

Arguments that always travel together are tuples:
  row     logits (pointer to the row), vocab, top (its largest logit, finite), inverse temperature
  groups  maxima (pointer to the row's), how many
  short   group numbers, logits, token ids (pointers to the row's short lists)
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.sampling_draw import load_logits

_INF = tl.constexpr(float("inf"))
_NONE = tl.constexpr(-(1 << 31))  # key before any bit is set: no cut found
_TOP_BIT = tl.constexpr(1 << 31)
_COARSE_BITS = tl.constexpr(20)  # sign, exponent, 11 bits of fraction: the rest stays 0, still a lower bound


@triton.jit
def _value(key):
    """The float32 of an int64 key in [-2**31, 2**31); keys are in the order of the floats."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _found(key):
    return tl.where(key > _NONE, _value(key), -_INF)


@triton.jit
def first_cut(row, groups, sums, scales, by_count, target, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """A lower bound of the cut at which `target` tokens (if `by_count`) or that much mass are left; -inf if none.

    sums: [GROUPS] pointers to the groups' masses relative to the logits at `scales`.
    If `target` groups have a maximum of at least t, then as many tokens have. And a group with such a maximum holds
    at least the mass of it, and at least all its mass but that of GROUP - 1 tokens just below t.
    """
    _, _, top, inv_temperature = row
    group_max, num_groups = groups
    group = tl.arange(0, GROUPS)
    maxima = tl.load(group_max + group, mask=group < num_groups, other=-_INF)
    scale = tl.load(scales, mask=group < num_groups, other=-_INF)
    mass = tl.load(sums, mask=group < num_groups, other=0.0) * tl.exp((scale - top) * inv_temperature)
    largest = tl.exp((maxima - top) * inv_temperature)
    key = tl.full([], _NONE, tl.int64)
    bit = tl.full([], _TOP_BIT, tl.int64)
    for _ in range(_COARSE_BITS):
        trial = _value(key + bit)
        below = (GROUP - 1) * tl.exp((trial - top) * inv_temperature)
        weights = tl.where(by_count, 1.0, tl.maximum(largest, mass - below))
        enough = tl.sum(tl.where(maxima >= trial, weights, 0.0), 0) >= target
        key = tl.where(enough, key + bit, key)
        bit = bit >> 1
    return _found(key)


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
def shortlist(row, groups, short, low, high, GROUPS: tl.constexpr, GROUP: tl.constexpr, SHORTLIST: tl.constexpr):
    """Copy the tokens with finite logits in [low, high), in rising order, as far as they fit. Returns their number."""
    logits, vocab, _, _ = row
    group_max, num_groups = groups
    short_groups, short_logits, short_ids = short
    group = tl.arange(0, GROUPS)
    maxima = tl.load(group_max + group, mask=group < num_groups, other=-_INF)
    live = ((maxima >= low) & (maxima > -_INF)).to(tl.int32)
    tl.debug_barrier()  # an earlier list may still be being read
    tl.store(short_groups + tl.cumsum(live, 0) - 1, group, mask=live > 0)
    num_tokens = tl.sum(live, 0) * GROUP
    tl.debug_barrier()  # the list is read by other threads than those that wrote it
    count = num_tokens * 0
    for start in range(0, num_tokens, SHORTLIST):
        i = start + tl.arange(0, SHORTLIST)
        token = tl.load(short_groups + i // GROUP, mask=i < num_tokens, other=0) * GROUP + i % GROUP
        x = load_logits(logits, tl.where(i < num_tokens, token, vocab), vocab)
        keep = ((x >= low) & (x < high) & (x > -_INF)).to(tl.int32)
        place = count + tl.cumsum(keep, 0) - 1
        fits = (keep > 0) & (place < SHORTLIST)
        tl.store(short_logits + place, x, mask=fits)
        tl.store(short_ids + place, token, mask=fits)
        count += tl.sum(keep, 0)
    tl.debug_barrier()
    return count


@triton.jit
def weigh(row, cut, TILE: tl.constexpr):
    """How many tokens of a row have at least `cut`, and their mass."""
    logits, vocab, top, inv_temperature = row
    masses = tl.zeros([TILE], tl.float32)
    counts = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        x = load_logits(logits, start + tl.arange(0, TILE), vocab)
        keep = (x >= cut) & (x > -_INF)
        masses += tl.where(keep, tl.exp((x - top) * inv_temperature), 0.0)
        counts += keep.to(tl.int32)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _lowest(row, TILE: tl.constexpr):
    """The smallest finite logit of a row."""
    logits, vocab, _, _ = row
    lowest = tl.zeros([TILE], tl.float32) + _INF
    for start in range(0, vocab, TILE):
        x = load_logits(logits, start + tl.arange(0, TILE), vocab)
        lowest = tl.where(x > -_INF, tl.minimum(lowest, x), lowest)
    return tl.min(lowest, 0)


@triton.jit
def cut_in_memory(
    row,
    groups,
    short,
    low,
    num_low,
    by_count,
    target,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    SHORTLIST: tl.constexpr,
):
    """`exact_cut` over a whole row, known to be at least `low`; a token weighs 1 if `by_count`, else its mass.

    Bisects the logits in [low, high) until the tokens there fit a short list, then searches that. num_low: tokens of
    at least `low`. A range that cannot be halved any more is one value: the cut.
    """
    _, _, top, inv_temperature = row
    if low == -_INF:
        low = _lowest(row, SHORTLIST)
    high = top * 0 + _INF
    num_high = num_low * 0
    above = top * 0  # weight of the tokens of at least `high`
    middle = low * 0.5 + top * 0.5
    while (num_low - num_high > SHORTLIST) & (low < middle) & (middle < high):
        count, mass = weigh(row, middle, SHORTLIST)
        weight = tl.where(by_count, count.to(tl.float32), mass)
        if weight >= target:
            low = middle
            num_low = count
        else:
            high = middle
            num_high = count
            above = weight
        middle = low * 0.5 + tl.minimum(high, top) * 0.5
    if num_low - num_high <= SHORTLIST:
        count = shortlist(row, groups, short, low, high, GROUPS, GROUP, SHORTLIST)
        i = tl.arange(0, SHORTLIST)
        x = tl.load(short[1] + i, mask=i < count, other=-_INF)
        weights = tl.where(by_count, 1.0, tl.exp((x - top) * inv_temperature))
        low = tl.maximum(low, exact_cut(x, tl.where(x > -_INF, weights, 0.0), target - above))
    return low
