"""How a product of 8-bit integers on both sides is cut up: a rule of rows and outputs, no list of shapes.

It was fitted to measurements on an H100. Few rows are memory's rate: narrow tiles where outputs are few, so that every
processor has some. Of more, tiles are as large as leaves every processor something to do.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class Plan(NamedTuple):
    """block_m, block_n, block_k: rows, outputs and columns of K of a tile."""

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


@cache
def plan(m: int, n: int, *, gated: bool, processors: int) -> Plan:
    """For m rows of x and n outputs (of gate and up each, if gated)."""
    if m <= 16:
        return Plan(16, 16, 512, 4, 2) if n <= 32 * processors and not gated else Plan(16, 64, 256, 4, 4)
    if m <= 64:
        return Plan(32 if m <= 32 else 64, 64, 256, 4, 4)
    if gated:
        return Plan(128, 128, 128, 4, 8) if m <= 384 else Plan(256, 64, 128, 3, 8)
    if m <= 128:
        one_round = _tiles(m, n, 64, 64) <= processors
        return Plan(64, 64, 256, 4, 4) if one_round else Plan(64, 64, 128, 6, 4)
    fills = m > 512 and 3 * _tiles(m, n, 256, 128) >= 2 * processors
    return Plan(256, 128, 128, 3, 8) if fills else Plan(128, 64, 128, 4, 4)


def _tiles(m: int, n: int, rows: int, outputs: int) -> int:
    return -(-m // rows) * -(-n // outputs)
