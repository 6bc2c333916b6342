"""How products of 17 to 128 rows are cut up, as measured on an H200 in chains of decoder layers.

`python -m benchmarks.kernels --only batch` measures them again. Shapes that are not in the table go through the
library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

MAX_ROWS = 128  # at 256 the library is faster or within a tenth: it shares tiles of x among processors
BUCKETS = (32, 48, 64, 96, 128)  # rows up to each share one configuration


@dataclass(frozen=True)
class Config:
    """One way to cut a product up.

    block_m, block_n, block_k: rows, outputs and columns of K of a tile. split: shares of K. tall: the weight is the
    operand whose lines the matrix units take 64 at a time, else x is. prefetch: columns of K that a program sends for
    ahead of its wait.
    """

    block_m: int
    block_n: int
    block_k: int
    split: int = 1
    num_warps: int = 4
    num_stages: int = 4
    tall: bool = False
    prefetch: int = 0


# (k, n, gated) → a configuration a bucket; None where the library and kernels of their own around it are faster: also
# between the heights of tiles, since the copy engine is slow at rows that are not there.
TABLE: dict[tuple[int, int, bool], tuple[Config | None, ...]] = {
    # qwen3-0.6b: qkv, o, gate_up, down, lm_head
    (1024, 4096, False): (
        Config(32, 64, 128, 1, 4, 6, tall=True, prefetch=1024),
        None,
        Config(64, 32, 128, 1, 4, 4, prefetch=1024),
        None,
        Config(128, 32, 128, 1, 8, 4, prefetch=1024),
    ),
    (2048, 1024, False): (
        Config(32, 32, 128, 4, 4, 4, prefetch=512),
        None,
        Config(64, 16, 128, 2, 4, 4, prefetch=1024),
        None,
        Config(64, 32, 128, 2, 4, 5, prefetch=1024),
    ),
    (1024, 3072, True): (
        Config(32, 64, 128, 1, 4, 4, tall=True, prefetch=512),
        None,
        Config(64, 16, 128, 1, 4, 3, prefetch=1024),
        None,
        Config(64, 32, 128, 1, 4, 3, prefetch=512),
    ),
    (3072, 1024, False): (
        Config(32, 64, 128, 6, 4, 4, tall=True, prefetch=512),
        None,
        Config(64, 16, 128, 2, 4, 4, prefetch=1536),
        None,
        Config(64, 32, 128, 4, 4, 4, prefetch=512),
    ),
    (1024, 151936, False): (None, None, Config(64, 128, 128, 1, 4, 4, prefetch=512), None, None),
    # llama-3.1-8b: qkv, o, gate_up, down, lm_head
    (4096, 6144, False): (None, None, Config(64, 64, 128, 1, 4, 6, tall=True, prefetch=128), None, None),
    (4096, 4096, False): (None, None, Config(64, 32, 128, 1, 4, 8, prefetch=1024), None, None),
    (4096, 14336, True): (
        None,
        None,
        Config(64, 128, 64, 1, 4, 5, tall=True, prefetch=384),
        Config(128, 64, 64, 1, 8, 3, tall=True),
        Config(128, 64, 64, 1, 8, 3, tall=True),
    ),
    (14336, 4096, False): (None, None, Config(64, 32, 128, 2, 4, 4, prefetch=128), None, None),
    (4096, 128256, False): (None, None, Config(64, 128, 128, 1, 8, 4, prefetch=512), None, None),
}


def bucket(m: int) -> int:
    """Place in BUCKETS of products of m rows."""
    return next(i for i, most in enumerate(BUCKETS) if m <= most)


def pays(m: int, n: int, k: int, gated: bool) -> bool:
    """Whether the kernel was seen to beat the library for x [m, k] and n outputs."""
    known = TABLE.get((k, n, gated))
    return known is not None and known[bucket(m)] is not None


@cache
def choose(m: int, n: int, k: int, gated: bool) -> Config:
    """The configuration for x [m, k] and n outputs. Raises ValueError where `pays` says no."""
    found = TABLE.get((k, n, gated), (None,) * len(BUCKETS))[bucket(m)]
    if found is None:
        raise ValueError(f"no configuration is known for {m} rows, {n} outputs{' twice' if gated else ''} and k = {k}")
    return found
