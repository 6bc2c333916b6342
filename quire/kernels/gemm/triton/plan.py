"""How to multiply up to 128 rows: which kernel, and how it cuts the product up. A rule of rows, outputs and K, no list
of shapes.

It was fitted to measurements on an H200 (132 processors): each kernel's ways to cut up every product of seven models
of 0.6 to 14 billion weights, in chains of decoder layers (`python -m benchmarks.gemm_sweep`). What they say:

- One row: every product is bytes, read best by ordinary loads of a few long lines at a time.
- Up to 8 rows: short products (little K) are latency; the whole weight of a program goes into its registers before it
  waits for its predecessor. Longer ones stream through shared memory, few lines and many columns at a time.
- From 9 rows on tiles of 64 outputs are best, with what a processor's shared memory holds on its way, and one round of
  programs: the products that are added to the residual have the longest K and the fewest outputs, so K is shared out
  as long as all programs fit at once.
- From 65 rows on the library wins unless the tiles fill their rounds.
- Where nothing is added to a product, tiles whose weights are there before x is (`Ahead`) are as fast or faster from 17
  rows on: steps of 40 and of 64 rows of llama-3.1-8b on one GPU 4.76 → 4.68 ms and 4.88 → 4.77. Of 65 to 128 rows only
  gated ones of one round: 96 rows took 6.11 ms with those of more rounds, and the library for queries, keys and values,
  and take 5.94.

Products of a rank of two or four (of 8 and 70 billion weights) and of qwen3-32b came later: longer K and fewer outputs
than those, where tiles that make one round of programs beat the others for 2 to 8 rows too.

A weight of 8 bits (`plan_8_bits`) is half the bytes, so that what is on its way must be twice as many elements for the
same share of memory's rate. Up to 16 rows x is multiplied as it is and the weight widened; from there on widening would
hold the products up, and x is rounded to 8 bits too. On an H100, in chains of layers of models of 1 to 8 billion
weights:

- Up to 16 rows a ring (`Ring`) is best on compute capability 9.0. Few steps of it on their way are enough; more delay
  those who read little and are waited for, as attention. One very long row (down of 7B and 14B) is left to ordinary
  loads.
- From 17 rows on one program a processor is enough where sums are shared, and gate and up want steps of 256 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

MAX_ROWS = 128  # at 256 the library is faster or within a tenth: it shares tiles of x among processors
PROCESSORS = 132
SHARED_BYTES = 226 * 1024  # of a processor, for programs' tiles; a program has some more for its barriers
MAX_STAGES = 8
MANY_OUTPUTS = 32768  # of a vocabulary: many rounds of tiles
RING_COLUMNS, RING_STEP = 1024, 16 * 1024  # of a step, and its bytes
RING_SUMS = 9 * 1024  # bytes, for warps' sums
KEPT_BYTES = 128 * 1024  # for x, at most
MOST_PARTS = 8  # of a product, for who adds them up


@dataclass(frozen=True, slots=True)
class Vector:
    """For one row: `outputs` a program, `width` elements of K at a time. apart: the norm in a kernel of its own."""

    outputs: int
    width: int
    warps: int
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """The weight through `stages` tiles in shared memory: `outputs` a program, `step` elements of K a tile and warp.
    Norm and gate apart."""

    outputs: int
    step: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class Registers:
    """The weight straight into registers: `outputs` a program, `step` elements of K a tile and warp, tiles fetched
    `depth` ahead."""

    outputs: int
    step: int
    depth: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of x and the weight through the bulk copy engine. Norm apart.

    block_m, block_n, block_k: rows, outputs and columns of K of a tile. split: shares of K. tall: the weight is the
    operand whose lines the matrix units take 64 at a time, else x is. prefetch: columns of K that a program sends for
    ahead of its wait. With a weight of 8 bits x goes to 8 bits too.
    """

    block_m: int
    block_n: int
    block_k: int
    split: int = 1
    num_warps: int = 4
    num_stages: int = 4
    tall: bool = False
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class Ring:
    """A weight of 8 bits through a ring of `stages` steps in shared memory, in each of `programs` on a processor.

    flight: steps that are on their way at a time. split: shares of K, of several rows. early: the next kernel is let in
    once x is there, else once the rest of the weight has its place in the ring.
    """

    stages: int
    flight: int
    programs: int = 1
    split: int = 1
    early: bool = False


@dataclass(frozen=True, slots=True)
class Ahead:
    """Tiles of all rows by `lines` of the weight (gated: as many of gate and of up), whose first steps are there before
    x is; K in `parts`, each with a result of its own, for who adds them up. Norm apart."""

    lines: int
    parts: int = 1


Plan = Vector | Shared | Registers | Tiles | Ring | Ahead


@cache
def plan(m: int, n: int, k: int, *, gated: bool, residual: bool, bulk: bool, ahead: bool = False) -> Plan | None:
    """For x [m, k] and n outputs (of gate and up each, if gated); None: the library.

    residual: outputs are added to what stands there, and there is no norm before. bulk: there is a bulk copy engine,
    and rows lie such that it can read them. ahead: `Ahead` is there, and nothing is added to the product.
    """
    if ahead and m > 16 and (how := _ahead(m, n, k, gated=gated)) is not None:
        return how
    if m == 1:
        return _one_row(n, k, gated=gated, residual=residual)
    if m <= 8:
        return _few_rows(n, k, gated=gated, residual=residual, bulk=bulk)
    if not bulk:
        return None if m > 16 else _registers(k, gated=gated) or Shared(16, 64, 4, 4)
    if m <= 16:
        return _sixteen_rows(n, k, gated=gated, residual=residual)
    if m <= 64:
        return _batch(m, n, k, gated=gated, residual=residual)
    return _many_rows(n, k, gated=gated, residual=residual) if m <= MAX_ROWS else None


def parts_to_sum(m: int, n: int, k: int) -> int:
    """In how many parts `Ahead` makes a product of 17 to 128 rows for who adds them up: as many as find a processor,
    of three steps each and more."""
    most = min(PROCESSORS // -(-n // 64), k // 384, MOST_PARTS)
    return max(most, 1) if 16 < m <= MAX_ROWS else 1


def parts_to_rotate(m: int, n: int, k: int) -> int:
    """The same for rotations, which take longer for it: where whole tiles leave most processors idle."""
    return parts_to_sum(m, n, k) if k >= 2048 and 5 * -(-n // 64) <= 2 * PROCESSORS else 1


@cache
def plan_8_bits(m: int, n: int, k: int, *, gated: bool, residual: bool, bulk: bool, ring: bool = False) -> Plan | None:
    """The same for a weight of 8 bits; None: by the library, which wants x in 8 bits too. ring: `Ring` is there too."""
    if m <= 16 and ring and (how := _ring(m, n, k, gated=gated, residual=residual)) is not None:
        return how
    if m == 1:
        return _one_row_8_bits(n, k, gated=gated, residual=residual)
    if m <= 16:
        how = plan(m, n, k, gated=gated, residual=residual, bulk=False)
        if isinstance(how, Registers):
            return Registers(how.outputs, how.step, 4 if residual else 2 * how.depth, how.warps)
        return Shared(16, 128 if gated else 256, 3, 4)
    if not bulk or m > 64:
        return None
    rows, tiles = (32 if m <= 32 else 64), -(-n // 64)
    if gated:  # two on a processor have little room
        return _tiles(rows, 64, 256 if tiles > PROCESSORS else 128, k, 2, gated=True, tall=True, width=1)
    split = _split(tiles) if residual else 1
    if residual and (rows == 64 or 10 * tiles * split >= 9 * PROCESSORS):  # longer sums want fewer shares
        return _tiles(rows, 64, 256 if rows == 32 else 128, k, split=split, tall=True, width=1)
    return _tiles(rows, 64, 128, k, 2, split=_split(tiles, 2 * PROCESSORS) if residual else 1, tall=True, width=1)


def _ring(m: int, n: int, k: int, *, gated: bool, residual: bool) -> Ring | None:
    """One row: two programs on a processor, so that one computes while the other waits; but what is added to the
    residual, where it fills rounds of programs, in one with a long ring, as what comes before it may leave memory idle.
    More rows: what there is room for beside x.

    None: small products, and where x is too long to be kept.
    """
    if n * k < 1 << 22 or k < 2 * RING_COLUMNS:
        return None
    steps = -(-k // RING_COLUMNS)
    if m == 1:
        units = -(-n // (8 if gated else 16))
        if residual and k <= 16 * RING_COLUMNS and 10 * units >= 9 * PROCESSORS * -(-units // PROCESSORS):
            return Ring(8, 3, early=True)
        return Ring(4, 2, programs=2) if k <= 10 * RING_COLUMNS else None
    rows, split = (8 if m <= 8 else 16), -(-steps // 4) if residual else 1
    kept = rows * -(-steps // split) * RING_COLUMNS * 2
    if kept > KEPT_BYTES:
        return None
    stages = (SHARED_BYTES - RING_SUMS - kept) // RING_STEP
    if m <= 8:
        return Ring(min(stages, 9), 3, split=split) if gated else Ring(min(stages, 5), 2, split=split)
    return Ring(min(stages, 5), min(stages, 5), split=split, early=True)


def _registers(k: int, *, gated: bool) -> Registers | None:
    """For products that are latency more than bytes; None: too long for that."""
    return Registers(16, 128, 2, 4 if gated else 8) if k <= 3072 else None


def _one_row(n: int, k: int, *, gated: bool, residual: bool) -> Plan:
    if gated:
        if k <= 1024:
            return Registers(16, 128, 2, 4)
        return Vector(1, 2048, 4, apart=True) if k <= 4096 or k % 2048 == 0 else Vector(2, 1024, 4, apart=True)
    if residual:
        short = (k <= 2048 and 2 * k <= n) or (k < n and k % 2048 != 0)  # a rank's, of a layer that several share
        if n * k < 1 << 22 or (k <= 4096 and (short or _leaves_a_half(-(-n // 4)))):
            return Registers(16, 128, 2, 8)
        if k <= 4096:
            return Vector(4, 2048, 8)
        return (
            Vector(2, 1024, 4)
            if k > 5120 and n >= 4096 and k % 2048 == 1024
            else Vector(4, 2048 if k % 2048 == 0 else 1024, 4)
        )
    if n >= MANY_OUTPUTS or k <= 1024:
        return Vector(4, 1024, 4, apart=k > 2048)
    if k <= 2048:
        return Vector(8, 512, 4)
    # Where no turn ends with K, two of 2,048 columns leave many idle.
    if k <= 3072 and k % 512:
        return Registers(16, 128, 1, 8)
    return Vector(2, 1024 if k > 3072 and k % 2048 == 1024 else 2048, 4, apart=True)


def _leaves_a_half(programs: int) -> bool:
    """Whether the last round of programs, all of which are there at once, has less than half of the processors."""
    return programs <= 8 * PROCESSORS and 2 * (programs % PROCESSORS) < PROCESSORS


def _one_row_8_bits(n: int, k: int, *, gated: bool, residual: bool) -> Plan:
    """Few long lines for gate and up, many short ones where outputs are few. The loop over K is unrolled: more turns
    than these would need more registers than there are."""
    if (gated and k <= 1024) or (residual and n * k < 1 << 22):
        return Registers(16, 128, 4, 4 if gated else 8)
    even = k % 2048 == 0
    if gated:
        how = Vector(2, 2048 if even else 1024, 4, apart=True) if k >= 4096 else Vector(8, 512, 4, apart=True)
    elif residual:
        how = Vector(8, 512, 4) if k <= 16384 else Vector(2, 2048 if even else 1024, 4)
    else:
        how = Vector(4, 1024, 4, apart=k > 2048) if k >= 4096 or k <= 1024 else Vector(8, 512, 4, apart=k > 2048)
    return how if k <= 32 * how.width else Shared(16, 256, 3, 4)


def _few_rows(n: int, k: int, *, gated: bool, residual: bool, bulk: bool) -> Plan:
    tiles, narrow = -(-n // 64), -(-n // 32)
    if gated:
        if k <= 1024:
            return Registers(32, 128, 1, 8)
        if bulk and PROCESSORS < tiles <= 2 * PROCESSORS:  # two on a processor
            return _tiles(8, 64, 128, k, 2, gated=True) if k < 3072 else _tiles(8, 128, 128, k, gated=True)
        if bulk and k > 3072 and _is_a_round(narrow):
            return _tiles(8, 32, 512, k, gated=True)
        if bulk and k > 3072 and _is_a_round(tiles):
            return _tiles(8, 64, 256, k, gated=True)
        return Shared(16, 128, 3, 4)
    if residual:
        if bulk and 0.9 * PROCESSORS <= narrow <= PROCESSORS:  # a round of programs, and hardly a processor idle
            return _tiles(8, 32, 512, k)
        if bulk and 0.9 * PROCESSORS <= tiles <= PROCESSORS:
            return _tiles(8, 64, 256, k)
        if bulk and k > 4096 and 5 * tiles >= 3 * PROCESSORS:
            return _tiles(8, 64, 256, k, 3, split=_split(tiles, 3 * PROCESSORS)) if k > 5120 else _tiles(8, 64, 256, k)
        if k <= 5120:
            return Registers(16, 128, 2 if n <= 2048 else 1, 8)
        return Shared(16, 128, 3, 4)
    if n >= MANY_OUTPUTS:
        return Registers(16, 128, 2, 4) if k <= 1024 else Shared(16, 64, 4, 4)
    if bulk and (k > 4096 or (k > 3072 and (tiles > PROCESSORS or 4 * tiles < PROCESSORS))):
        return _tiles(8, 64, 256, k, 2 if tiles > PROCESSORS else 1, split=_split(tiles))
    if k > 3072:
        return Shared(16, 256, 2, 4)
    # A third turn that K does not fill takes registers: one program of 32 outputs on a processor, three of 16.
    return Registers(16 if k > 2048 and k % 1024 and n > 32 * PROCESSORS else 32, 128, 1, 8)


def _sixteen_rows(n: int, k: int, *, gated: bool, residual: bool) -> Plan:
    tiles = -(-n // 64)
    if gated:
        if k <= 1024:
            return Registers(32, 128, 1, 8)
        if PROCESSORS < tiles <= 2 * PROCESSORS:
            return _tiles(16, 64, 128, k, 2, gated=True)
        return _tiles(16, 64, 256, k, gated=True, split=_split(tiles))
    if n >= MANY_OUTPUTS:
        return _tiles(16, 64, 128, k, 2)
    if residual:
        if k <= 3072 and n <= 2048:
            return Registers(16, 128, 4, 4)
        return _tiles(16, 64, 256, k, split=_split(tiles))
    if k <= 2048:
        return Registers(16, 128, 4, 4)
    return _tiles(16, 64, 256, k, 2, split=_split(tiles, 2 * PROCESSORS))


def _batch(m: int, n: int, k: int, *, gated: bool, residual: bool) -> Plan:
    """17 to 64 rows."""
    rows, tiles = (32 if m <= 32 else 64), -(-n // 64)
    if n >= MANY_OUTPUTS and not gated:
        if rows == 32:
            return _tiles(rows, 64, 128, k, 2, tall=True)
        return _tiles(rows, 64, 64, k, 2) if k <= 1024 else _tiles(rows, 128, 128, k)
    narrow = -(-n // 32)
    if gated:
        if rows == 64 and k > 3072 and _is_a_round(narrow):
            return _tiles(64, 32, 128, k, gated=True)
        tall = rows == 32 or tiles > PROCESSORS or (k > 4096 and _is_a_round(tiles))
        return _tiles(rows, 64, 128, k, gated=True, tall=tall)
    tall = rows == 32
    if rows == 64:
        if not residual and k > 4096 and tiles * _split(tiles) > narrow * _split(narrow):
            return _tiles(64, 64, 128, k, split=_split(tiles), tall=True)  # more programs than narrow ones make
        if narrow <= PROCESSORS:
            return _tiles(64, 32, 128, k, split=_split(narrow) if residual or k > 3072 else 1)
        if 5 * tiles < 3 * PROCESSORS:
            return _tiles(64, 32, 128, k, 2)
        tall = residual and k > 5120
    return _tiles(rows, 64, 128, k, split=_split(tiles) if residual else 1, tall=tall)


def _many_rows(n: int, k: int, *, gated: bool, residual: bool) -> Plan | None:
    """65 to 128 rows."""
    tiles = -(-n // 64)
    if residual or n >= MANY_OUTPUTS:
        return None
    if gated:
        rounds = -(-tiles // PROCESSORS)
        return _tiles(128, 64, 64, k, gated=True) if 5 * tiles >= 4 * rounds * PROCESSORS else None
    if -(-n // 32) <= PROCESSORS:
        return _tiles(128, 32, 128, k)
    return _tiles(128, 64, 64, k) if 7 * PROCESSORS <= 10 * tiles <= 10 * PROCESSORS else None


def _ahead(m: int, n: int, k: int, *, gated: bool) -> Ahead | None:
    """17 to 128 rows."""
    tiles, narrow = -(-n // 64), -(-n // 32)
    if k < 512 or m > MAX_ROWS:
        return None
    if m > 64:
        whole = _is_a_round(tiles)
        return Ahead(64 if whole else 32) if gated and (whole or _is_a_round(narrow)) else None
    if gated:
        return Ahead(64 if 5 * tiles >= 3 * PROCESSORS else 32)
    if k >= 2048 and _is_a_round(narrow):
        return Ahead(32)
    return Ahead(64) if 9 * PROCESSORS <= 20 * tiles <= 20 * PROCESSORS else None


def _is_a_round(programs: int) -> bool:
    """Whether so many are there at once and leave few processors idle."""
    return 5 * programs >= 4 * PROCESSORS and programs <= PROCESSORS


def _split(tiles: int, programs: int = PROCESSORS) -> int:
    """Shares of K, so that all programs run at once."""
    return min(max(programs // tiles, 1), 4)


def _tiles(
    block_m: int,
    block_n: int,
    block_k: int,
    k: int,
    programs: int = 1,
    *,
    gated: bool = False,
    split: int = 1,
    tall: bool = False,
    width: int = 2,
) -> Tiles:
    """As many stages as leave room for `programs` on a processor; no share of K shorter than three steps. width: bytes
    of an element."""
    stage = (block_m + (2 * block_n if gated else block_n)) * block_k * width
    steps = -(-k // block_k)
    split = min(split, max(steps // 3, 1))
    stages = max(min(SHARED_BYTES // programs // stage, MAX_STAGES, -(-steps // split)), 2)
    prefetch = k if k <= 1024 and not gated else 512 // width
    return Tiles(block_m, block_n, block_k, split, 4, stages, tall or block_m <= 16, prefetch)
