"""How a weight in codes is multiplied by tiles of rows on compute capability 9.0: how they are cut and dealt out, and
from how many rows on it is better widened. A rule of rows, outputs and K, no list of shapes."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from quire.kernels.gemm.codes import BLOCK, Kind

LINES = 128  # of the weight, a tile of one half


class Plan(NamedTuple):
    """rows: of x, a tile. halves: so many times 128 lines of the weight. waves: of whole tiles; the rest is shared."""

    rows: int
    halves: int
    waves: int


class Cost(NamedTuple):
    """In what 128 lines by 128 rows by 128 columns take. block: of a tile's 128 columns. sharing: of tiles, once."""

    block: float
    sharing: float


# As measured on an H100, of rows and halves a tile. Taller ones do more with what they read, and leave more to add up.
COSTS = {(64, 1): Cost(0.6, 12), (128, 1): Cost(1, 16), (128, 2): Cost(1.87, 29)}
GATED_COSTS = {(64, 2): Cost(1.16, 19), (128, 2): Cost(1.87, 29)}
FEW_ROWS_GATED = Cost(1.3, 16)  # up to 64, on an H200
STARTING = 7  # what it takes to begin and end where no tile is shared
# What decoding takes beyond the matrix units' time, of that time: as measured for gate and up of an 8B model, on an
# H100.
BEYOND = {"int4": 0.25, "int8": 0.25, "e4m3": 0.6, "e2m1": 0.4, "nf4": 1.2, "fp4": 1.2}
SMALL_GROUPS = 0.4  # and more, for scales
FEWEST_WIDENED = 512  # rows: fewer do not hide what a pass of its own takes
WIDENED_ROWS = 400  # whose product takes as long as to widen the weight: a GPU's operations for each byte, times bytes


@cache
def plan(m: int, n: int, k: int, *, gated: bool, plain: bool, processors: int) -> Plan:
    """For x [m, k] and n outputs what takes the least time; up to 64 rows are one tile's. plain: codes become
    operands in one step."""
    if m <= 64:
        return _few_rows(m, n, k, gated=gated, plain=plain, processors=processors)
    found: list[tuple[float, Plan]] = []
    for (rows, halves), cost in (GATED_COSTS if gated else COSTS).items():
        tiles = num_tiles(m, n, rows, halves, gated=gated)
        rounds, column = -(-tiles // processors), -(-k // BLOCK) * cost.block
        found.append((rounds * column + STARTING, Plan(rows, halves, rounds)))
        # A round at the least is left to be shared: with less every tile would have many parts.
        found.append((tiles / processors * column + cost.sharing, Plan(rows, halves, max(tiles // processors - 1, 0))))
    return min(found)[1]


def _few_rows(m: int, n: int, k: int, *, gated: bool, plain: bool, processors: int) -> Plan:
    """Tiles are shared, but those with a gate where they nearly fill their rounds."""
    rows, halves = 16 if m <= 16 else 32 if m <= 32 else 64, 2 if gated else 1
    tiles = num_tiles(m, n, rows, halves, gated=gated)
    rounds, column = -(-tiles // processors), -(-k // BLOCK) * FEW_ROWS_GATED.block
    whole = rounds * column + STARTING < tiles / processors * column + FEW_ROWS_GATED.sharing
    return Plan(rows, halves, rounds if gated and plain and whole else 0)


def num_tiles(m: int, n: int, rows: int, halves: int, *, gated: bool) -> int:
    return -(-m // rows) * -(-n // (LINES if gated else LINES * halves))


@cache
def most_rows(kind: Kind, group: int, *, plain: bool) -> int | None:
    """From more on it takes less to widen the weight once and to multiply by that, than to decode it for each tile of
    rows anew; None: no number is too large."""
    if plain:
        return None
    beyond = BEYOND[kind] + (SMALL_GROUPS if group < BLOCK else 0)
    return max(int(WIDENED_ROWS / beyond), FEWEST_WIDENED)
