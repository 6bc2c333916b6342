"""The cut of top-k and top-p: the logit below which a row's tokens are dropped.

A cut is the largest t for which the tokens at or above t are enough: k of them, or so many that they hold p of the
mass. Enough is monotone in t. A cheap lower bound of the cut comes from groups of 64 tokens (`first_cut`); the tokens
above the bound are copied to a short list (a few dozen for a usual top-k, a few thousand for a usual top-p), where t
is built exactly, bit by bit, in the order of the floats. Only for a row whose list overflows is the range of t first
narrowed by passes over the whole row.

Arguments that always travel together are tuples:
  row     logits (pointer to the row), vocab, top (its largest logit, finite), inverse temperature
  groups  maxima (pointer to the row's), how many
  short   group numbers, logits, token ids (pointers to the row's short lists)
  enough  whether tokens are counted or weighed, the number or mass that is enough
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.sampling_draw import load_logits

_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_TOP_BIT = tl.constexpr(1 << 31)
_COARSE_BITS = tl.constexpr(16)  # sign, exponent, 7 bits of fraction: the rest stays 0, still a lower bound


@triton.jit
def _value(key):
    """The float32 of an int64 key in [0, 2**32); keys are in the order of the floats, key 0 is none."""
    bits = (key - _TOP_BIT).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key(value):
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + _TOP_BIT


@triton.jit
def next_up(value):
    """The smallest float above a finite one."""
    return _value(_key(value) + 1)


@triton.jit
def first_cut(row, groups, sums, scales, enough, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """A lower bound of the cut; -inf if none is known.

    sums: [GROUPS] pointers to the groups' masses relative to the logits at `scales`.
    If n groups have a maximum of at least t, then as many tokens have. And a group with such a maximum holds at least
    the mass of it, and at least all its mass but that of GROUP - 1 tokens just below t.
    """
    _, _, top, inv_temperature = row
    group_max, num_groups = groups
    by_count, target = enough
    group = tl.arange(0, GROUPS)
    maxima = tl.load(group_max + group, mask=group < num_groups, other=-_INF)
    scale = tl.load(scales, mask=group < num_groups, other=-_INF)
    mass = tl.load(sums, mask=group < num_groups, other=0.0) * tl.exp((scale - top) * inv_temperature)
    largest = tl.exp((maxima - top) * inv_temperature)
    key = tl.full([], 0, tl.int64)
    bit = tl.full([], _TOP_BIT, tl.int64)
    for _ in range(_COARSE_BITS):
        trial = _value(key + bit)
        below = (GROUP - 1) * tl.exp((trial - top) * inv_temperature)
        weights = tl.where(by_count, 1.0, tl.maximum(largest, mass - below))
        key = tl.where(tl.sum(tl.where(maxima >= trial, weights, 0.0), 0) >= target, key + bit, key)
        bit = bit >> 1
    return tl.where(key > 0, _value(key), -_INF)


@triton.jit
def shortlist(
    row, groups, short, low, high,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, SHORTLIST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the tokens with finite logits in [low, high), in rising order. Returns how many; too many if > SHORTLIST."""
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
    start = num_tokens * 0
    while (start < num_tokens) & (count <= SHORTLIST):
        i = start + tl.arange(0, TILE)
        token = tl.load(short_groups + i // GROUP, mask=i < num_tokens, other=0) * GROUP + i % GROUP
        x = load_logits(logits, tl.where(i < num_tokens, token, vocab), vocab)
        keep = ((x >= low) & (x < high) & (x > -_INF)).to(tl.int32)
        place = count + tl.cumsum(keep, 0) - 1
        fits = (keep > 0) & (place < SHORTLIST)
        tl.store(short_logits + place, x, mask=fits)
        tl.store(short_ids + place, token, mask=fits)
        count += tl.sum(keep, 0)
        start += TILE
    tl.debug_barrier()
    return count


@triton.jit
def narrow(row, low, high, above, enough, TILE: tl.constexpr):
    """The quarter of [low, high) in which the cut is, and the weight of the tokens above it. One pass over the row.

    above: the weight of the tokens of at least `high`. Does nothing if no float lies between the two.
    """
    logits, vocab, top, inv_temperature = row
    by_count, target = enough
    second = low * 0.5 + tl.minimum(high, _LARGEST) * 0.5
    first = low * 0.5 + second * 0.5
    third = second * 0.5 + tl.minimum(high, _LARGEST) * 0.5
    weight_1 = tl.zeros([TILE], tl.float32)
    weight_2 = tl.zeros([TILE], tl.float32)
    weight_3 = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab, TILE):
        x = load_logits(logits, start + tl.arange(0, TILE), vocab)
        weight = tl.where(by_count, 1.0, tl.exp((x - top) * inv_temperature))
        weight_1 += tl.where(x >= first, weight, 0.0)
        weight_2 += tl.where(x >= second, weight, 0.0)
        weight_3 += tl.where(x >= third, weight, 0.0)
    above_1, above_2, above_3 = tl.sum(weight_1, 0), tl.sum(weight_2, 0), tl.sum(weight_3, 0)
    past_1, past_2, past_3 = above_1 >= target, above_2 >= target, above_3 >= target
    new_low = tl.where(past_3, third, tl.where(past_2, second, tl.where(past_1, first, low)))
    new_high = tl.where(past_3, high, tl.where(past_2, third, tl.where(past_1, second, first)))
    new_above = tl.where(past_3, above, tl.where(past_2, above_3, tl.where(past_1, above_2, above_1)))
    return new_low, new_high, new_above


@triton.jit
def exact_cut(row, short, count, low, high, above, enough, TILE: tl.constexpr):
    """The cut, known to be in [low, high], among `count` listed tokens; tokens not listed weigh `above` in all.

    Bits that `low` and `high` share are not searched. If nothing is enough, the result is at most `low`.
    """
    _, _, top, inv_temperature = row
    _, short_logits, _ = short
    by_count, target = enough
    bit = tl.full([], _TOP_BIT, tl.int64)
    differing = _key(low) ^ _key(high)
    while bit > differing:
        bit = bit >> 1
    rest = tl.maximum(2 * bit - 1, 0)
    key = (_key(low) | rest) - rest
    while bit > 0:
        trial = _value(key + bit)
        weights = tl.zeros([TILE], tl.float32)
        for start in range(0, count, TILE):
            i = start + tl.arange(0, TILE)
            x = tl.load(short_logits + i, mask=i < count, other=-_INF)
            weight = tl.where(by_count, 1.0, tl.exp((x - top) * inv_temperature))
            weights += tl.where(x >= trial, weight, 0.0)
        key = tl.where(above + tl.sum(weights, 0) >= target, key + bit, key)
        bit = bit >> 1
    return _value(key)
