"""What the sampling kernels share: clean logits, the row's random number, inverse CDF in two levels."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.sampling.state import Column

_KEY_LOW = tl.constexpr(int(Column.KEY_LOW))
_KEY_HIGH = tl.constexpr(int(Column.KEY_HIGH))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


@triton.jit
def load_float(column):
    return tl.load(column).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logits_row, tokens, vocab):
    """Logits of `tokens`: NaN and places past the vocabulary as -inf, nothing above the largest finite number."""
    x = tl.load(logits_row + tokens, mask=tokens < vocab, other=-_INF)
    return tl.where(x == x, tl.minimum(x, _LARGEST), -_INF)


@triton.jit
def uniform(column, length):
    """Twin of `kernels.sampling.sampling.uniform`."""
    low = tl.load(column + _KEY_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(column + _KEY_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    z = ((high << 32) | low) + length.to(tl.uint64) * _GOLDEN
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    z = z ^ (z >> 31)
    return (z >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def draw(weights, places, target):
    """The first place where the running sum passes `target`, and what is left of the target there.

    places rise. A place of weight 0 is only taken if all are 0. A parallel scan may round such that its sums dip or
    end below the target: then the last place that has weight is taken.
    """
    passed = (tl.cumsum(weights, 0) > target) & (weights > 0)
    first = tl.min(tl.where(passed, places, 2147483647), 0)
    last = tl.max(tl.where(weights > 0, places, 0), 0)
    place = tl.minimum(first, last)
    return place, target - tl.sum(tl.where(places < place, weights, 0.0), 0)


@triton.jit
def load_chunks(row, chunks, chunk_max, chunk_sum, inv_temperature, CHUNKS: tl.constexpr):
    """The row's maximum (finite) and the masses of its chunks relative to it, [CHUNKS]."""
    chunk = tl.arange(0, CHUNKS)
    maxima = tl.load(chunk_max + row * chunks + chunk, mask=chunk < chunks, other=-_INF)
    sums = tl.load(chunk_sum + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    top = tl.maximum(tl.max(maxima, 0), -_LARGEST)
    return top, tl.where(maxima > -_INF, sums * tl.exp((maxima - top) * inv_temperature), 0.0)


@triton.jit
def draw_from_row(logits_row, vocab, masses, top, inv_temperature, cut, u, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """A token whose logit is at least `cut`; masses: [CHUNKS] of such tokens."""
    chunk, rest = draw(masses, tl.arange(0, CHUNKS), u * tl.sum(masses, 0))
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits_row, tokens, vocab)
    token, _ = draw(tl.where(x >= cut, tl.exp((x - top) * inv_temperature), 0.0), tokens, rest)
    # Weights that all vanish leave place 0 of the chunk; a row that is all -inf leaves token 0.
    return token


@triton.jit
def greedy(row, chunks, chunk_max, chunk_argmax, CHUNKS: tl.constexpr):
    """The lowest token id among the largest logits."""
    chunk = tl.arange(0, CHUNKS)
    maxima = tl.load(chunk_max + row * chunks + chunk, mask=chunk < chunks, other=-_INF)
    best = tl.min(tl.where(maxima == tl.max(maxima, 0), chunk, CHUNKS), 0)
    return tl.load(chunk_argmax + row * chunks + best)
