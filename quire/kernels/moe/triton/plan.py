"""How to multiply by experts: which kernels, and how they cut the products up. A rule of tokens, experts and sizes.

- So few tokens that hardly two want the same expert: each choice by itself, on the ordinary cores, without any order;
  the product down adds all of a token's experts to the residual at once.
- Else choices are ordered by expert. Few a tile: the weight is the tall operand of the matrix units and streams through
  shared memory once. Many: tiles as for any product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from quire.kernels.gemm.triton.plan import MAX_STAGES, SHARED_BYTES
from quire.kernels.triton.launch import next_power_of_2

LEAST_APART = 0.88  # share of the choices that must be of unlike experts for each to go by itself


@dataclass(frozen=True, slots=True)
class Direct:
    """A program has `outputs` of gate and up of one choice, or `down_outputs` of all of a token's; columns of K at a
    time, down of each choice, and of the shared experts together; and so many warps."""

    outputs: int
    columns: int
    down_outputs: int
    down_columns: int
    shared_columns: int = 512
    warps: int = 4
    down_warps: int = 4


@dataclass(frozen=True, slots=True)
class Tiles:
    """rows: of a tile of choices. block_n, block_k: outputs (of gate and up each) and columns of a tile of the weight.
    tall: the weight is the operand whose lines the matrix units take 64 at a time."""

    rows: int
    block_n: int
    block_k: int
    stages: int
    warps: int = 4
    tall: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """direct: then nothing else counts (see `apart`); gate_up and down have the same `rows`."""

    gate_up: Tiles
    down: Tiles
    direct: bool = False


@cache
def plan(tokens: int, top_k: int, experts: int, width: int = 2) -> Plan:
    """width: bytes of a weight's element."""
    choices = tokens * top_k
    unlike = experts * (1 - max(1 - top_k / experts, 0) ** tokens)
    direct = unlike >= LEAST_APART * choices
    mean = choices / experts
    if mean <= 8:
        rows = 16
    elif mean <= 20:
        rows = 32
    else:
        rows = 64 if mean <= 80 else 128
    return replace(of_rows(rows, width), direct=direct)


@cache
def apart(hidden: int, inner: int, top_k: int, *, shared: bool = False) -> Direct:
    """For choices that go by themselves. Loops over K are unrolled, with what they read held in registers: a line that
    takes one turn leaves room for more outputs of gate and up, three turns at most for fewer warps of the product down,
    if there are no shared experts beside. Where half the columns leave fewer of them idle in the last turn, it makes
    twice the outputs of those.
    """
    columns = min(2048, next_power_of_2(hidden))
    down_outputs, down_columns = 4, min(max(2048 // next_power_of_2(top_k), 64), next_power_of_2(inner))
    half = down_columns // 2
    if half >= 64 and -(-inner // half) * half < -(-inner // down_columns) * down_columns:
        down_outputs, down_columns = 8, half
    return Direct(
        outputs=4 if hidden <= columns else 2, columns=columns, down_outputs=down_outputs, down_columns=down_columns,
        down_warps=2 if inner <= 3 * down_columns and not shared else 4,
    )  # fmt: skip


HEIGHTS = (16, 32, 64, 128)  # of tiles, that there are plans for


@cache
def of_rows(rows: int, width: int) -> Plan:
    """For choices that are ordered in tiles of so many rows."""
    if width == 4:  # on the ordinary cores
        return Plan(_tiles(rows, 32, 32, 2, width, gated=True), _tiles(rows, 64, 32, 2, width))
    if width == 1:  # x too; outputs of gate and up that a program scales alike are the columns of a step of down
        if rows <= 64:
            tall = rows <= 32
            gate_up = _tiles(rows, 64, 256 if tall else 128, 2, width, gated=True, tall=tall)
            return Plan(gate_up, _tiles(rows, 64, 128, 3, width, tall=tall))
        return Plan(_tiles(128, 128, 128, 1, width, gated=True, warps=8), _tiles(128, 128, 128, 1, width, warps=8))
    if rows == 16:
        return Plan(_tiles(16, 64, 128, 2, width, gated=True, tall=True), _tiles(16, 128, 128, 2, width, tall=True))
    if rows == 32:  # more programs, each with less on its way: the last ones have less to do alone
        return Plan(_tiles(32, 64, 64, 3, width, gated=True, tall=True), _tiles(32, 64, 64, 5, width, tall=True))
    if rows == 64:
        return Plan(_tiles(64, 64, 64, 2, width, gated=True), _tiles(64, 128, 64, 2, width))
    return Plan(_tiles(128, 128, 64, 1, width, gated=True, warps=8), _tiles(128, 256, 64, 1, width, warps=8))


def _tiles(
    rows: int,
    block_n: int,
    block_k: int,
    programs: int,
    width: int,
    *,
    gated: bool = False,
    warps: int = 4,
    tall: bool = False,
) -> Tiles:
    """As many stages as leave room for `programs` on a processor."""
    stage = (rows + block_n * (2 if gated else 1)) * width * block_k
    stages = max(min(SHARED_BYTES // programs // stage, MAX_STAGES), 2)
    return Tiles(rows, block_n, block_k, min(stages, 4 if tall else 5), warps, tall)
