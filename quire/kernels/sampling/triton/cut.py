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

import triton
import triton.language as tl

from quire.kernels.sampling.triton.draw import load_logits

_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
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
def _append(short_logits, short_ids, token, x, low, high, count, SHORTLIST: tl.constexpr):
    """Those of a tile's tokens whose logits are in [low, high), as far as they fit. Returns the new `count`."""
    keep = ((x >= low) & (x < high) & (x > -_INF)).to(tl.int32)
    place = count + tl.cumsum(keep, 0) - 1
    fits = (keep > 0) & (place < SHORTLIST)
    tl.store(short_logits + place, x, mask=fits)
    tl.store(short_ids + place, token, mask=fits)
    return count + tl.sum(keep, 0)


@triton.jit
def shortlist(
    row, groups, short, low,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, SHORTLIST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the tokens with finite logits of at least `low`, in rising order; returns how many.

    More than SHORTLIST means that the list is not complete.
    """
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
        count = _append(short_logits, short_ids, token, x, low, _INF, count, SHORTLIST)
        start += TILE
        # Where many more than fit are to be expected, the rest is not worth reading.
        expected = count.to(tl.float32) * (num_tokens.to(tl.float32) / start.to(tl.float32))
        if (count > SHORTLIST // 8) & (expected > 1.5 * SHORTLIST):
            count = SHORTLIST + 1
    tl.debug_barrier()
    return count


@triton.jit
def keep_few(x, weights, top_k, top_p, total):
    """Weights of the tokens that top-k (if > 0) and top-p leave, else 0: every token is compared with every other.

    total: the mass that top_p is a part of; 0: what top-k leaves.
    """
    above = x[None, :] > x[:, None]  # [token, the others]
    if top_k > 0:
        weights = tl.where(tl.sum(above.to(tl.int32), 1) < top_k, weights, 0.0)
    if top_p < 1:
        mass = top_p * tl.where(total > 0, total, tl.sum(weights, 0))
        mass_above = tl.sum(tl.where(above, weights[None, :], 0.0), 1)
        weights = tl.where((mass_above < mass) | (mass_above == 0.0), weights, 0.0)
    return weights


@triton.jit
def narrow(row, low, high, within, above, enough, TILE: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr):
    """The one of PARTS equal parts of [low, high) that has the cut, and its `within` and `above`. Reads the row once.

    within, above: the weight of the tokens of at least `low` (or more, if not known), and of at least `high`.
    Does nothing if no float lies between the two.
    """
    logits, vocab, top, inv_temperature = row
    by_count, target = enough
    share = (tl.arange(0, PARTS) + 1).to(tl.float32) / PARTS
    bounds = low * (1.0 - share) + tl.minimum(high, _LARGEST) * share
    bounds = tl.minimum(tl.maximum(bounds, low), high)  # rounding must not leave the range
    token = tl.arange(0, TILE)[None, :]
    weights = tl.zeros([PARTS, TILE], tl.float32)
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        x = load_logits(logits, start + token, vocab)
        weight = tl.where(by_count, 1.0, tl.exp((x - top) * inv_temperature))
        weights += tl.where(x >= bounds[:, None], weight, 0.0)
    reached = tl.sum(weights, 1)  # falls with rising bounds
    passed = reached >= target
    new_low = tl.max(tl.where(passed, bounds, low), 0)
    new_high = tl.min(tl.where(passed, high, bounds), 0)
    return new_low, new_high, tl.min(tl.where(passed, reached, within), 0), tl.max(tl.where(passed, above, reached), 0)


@triton.jit
def list_range(row, short, low, high, SHORTLIST: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr):
    """Like `shortlist`, for tokens spread over the whole row."""
    logits, vocab, _, _ = row
    _, short_logits, short_ids = short
    count = vocab * 0
    tl.debug_barrier()  # an earlier list may still be being read
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        x = load_logits(logits, token, vocab)
        count = _append(short_logits, short_ids, token, x, low, high, count, SHORTLIST)
    tl.debug_barrier()  # it is read by other threads than those that wrote it
    return count


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
