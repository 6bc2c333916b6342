"""How to multiply up to 16 rows: which kernel with which tiles, as measured on an H200 in chains of decoder layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Vector:
    """For one row: `outputs` a program, `width` elements of K at a time."""

    outputs: int
    width: int
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
class Ring:
    """The weight through a ring of `stages` tiles in shared memory; the rest as in `Registers`."""

    outputs: int
    step: int
    stages: int
    warps: int


Plan = Vector | Registers | Ring

# (k, n, gated): for one row, up to 8 and up to 16; None: the library.
TABLE: dict[tuple[int, int, bool], tuple[Plan | None, Plan | None, Plan | None]] = {
    # Qwen3-0.6B: qkv, o, gate and up, down, logits
    (1024, 4096, False): (Registers(16, 128, 2, 4), Registers(16, 128, 2, 4), Registers(16, 256, 1, 4)),
    (2048, 1024, False): (Registers(8, 128, 2, 8), Registers(8, 128, 2, 8), Registers(16, 128, 2, 8)),
    (1024, 3072, True): (Registers(8, 128, 2, 4), Registers(16, 128, 2, 2), Registers(16, 64, 1, 8)),
    (3072, 1024, False): (Registers(8, 128, 3, 8), Registers(8, 128, 3, 8), Registers(8, 64, 3, 16)),
    (1024, 151936, False): (Vector(4, 1024, 2), Registers(16, 128, 2, 4), Registers(32, 128, 1, 4)),
}


MAX_REGISTERS = 3072  # longer K: a register kernel's code would be long, and its loads are not the best for memory


@cache
def plan(m: int, n: int, k: int, gated: bool) -> Plan | None:
    """For x [m, k] and n outputs; None: the library is faster."""
    bucket = 0 if m == 1 else 1 if m <= 8 else 2
    if (k, n, gated) in TABLE:
        return TABLE[k, n, gated][bucket]
    if m == 1:
        return Vector(4, 1024 if k >= 1024 else 512, 4)
    outputs = 8 if gated or n < 2048 else 16  # 16 rows of the weight, but more programs where outputs are few
    if k <= MAX_REGISTERS:
        return Registers(outputs, 128, 2, 4 if k <= 1024 else 8)
    return Ring(outputs, 128, 4, 4)
