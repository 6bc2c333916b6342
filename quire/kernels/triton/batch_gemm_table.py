"""How products of 17 to 256 rows are cut up, as measured on an H200 (`python -m benchmarks.kernels --only batch`)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.triton.launch import next_power_of_2

MAX_ROWS = 256
BUCKETS = (32, 64, 128, 256)  # rows up to each share one configuration: as many variants a shape as there are buckets
L2_SHARE = 24 << 20  # bytes of weight that all programs together may send for ahead of their turn


@dataclass(frozen=True)
class Config:
    """One way to cut a product up.

    block_m, block_n, block_k: rows, outputs and columns of K of a tile. split: shares of K. tall: the weight is the
    operand whose lines the matrix units take 64 at a time, else x is. prefetch: columns of K that a program sends for
    ahead of its wait. norm_inside: x is normed by the product's own kernel, else by one before it.
    """

    block_m: int
    block_n: int
    block_k: int
    split: int = 1
    num_warps: int = 4
    num_stages: int = 4
    tall: bool = False
    prefetch: int = 0
    norm_inside: bool = False


# (k, n, gated) → a configuration a bucket; None where the library and kernels of their own around it are faster.
TABLE: dict[tuple[int, int, bool], tuple[Config | None, ...]] = {}


def bucket(m: int) -> int:
    """Place in BUCKETS of products of m rows."""
    return next(i for i, most in enumerate(BUCKETS) if m <= most)


def pays(m: int, n: int, k: int, gated: bool) -> bool:
    """Whether the kernel beats the library for x [m, k] and n outputs, as far as is known."""
    if (k, n, gated) in TABLE:
        return TABLE[k, n, gated][bucket(m)] is not None
    return m <= 64


def choose(m: int, n: int, k: int, gated: bool) -> Config:
    """The configuration for x [m, k] and n outputs: the table's, else by rule."""
    known = TABLE.get((k, n, gated))
    found = known[bucket(m)] if known else None
    return found or by_rule(m, n, k, gated)


def by_rule(m: int, n: int, k: int, gated: bool) -> Config:
    """Enough programs for every processor, few shares of K, and tiles three to six deep."""
    block_m, block_k = BUCKETS[bucket(m)], 64
    block_n = 64 if n <= 8192 or gated or block_m == 256 else 128
    tiles = -(-n // block_n)
    split = min(next_power_of_2(max(192 // tiles, 1) + 1) // 2, 8, max(k // 256, 1))
    width = block_n * (2 if gated else 1)
    stages = min(max(108 * 1024 // ((block_m + width) * block_k * 2), 3), 6)
    share = -(-k // split)
    prefetch = min(share, max(L2_SHARE // (min(tiles * split, 264) * width * 2), 64)) // 64 * 64
    return Config(
        block_m, block_n, block_k, split, 8 if block_m * width >= 128 * 128 else 4, stages, block_m < 64, prefetch
    )
