"""How to multiply up to 16 rows: which kernel with which tiles, as measured on an H200 in chains of decoder layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Vector:
    """For one row: `outputs` a program, `width` elements of K at a time. Norm and gate apart."""

    outputs: int
    width: int
    warps: int


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
    """The weight straight into registers, norm and gate in the same kernel: `outputs` a program, `step` elements of K
    a tile and warp, tiles fetched `depth` ahead."""

    outputs: int
    step: int
    depth: int
    warps: int


Plan = Vector | Shared | Registers

MAX_REGISTERS = 3072  # beyond this K memory likes the other kernels' way of reading better
SHARED = Shared(16, 64, 4, 4)

# (k, n, gated): for one row, up to 8 and up to 16; None: the library, or norm and gate apart.
TABLE: dict[tuple[int, int, bool], tuple[Plan | None, Plan | None, Plan | None]] = {
    # Qwen3-0.6B: qkv, o, gate and up, down, logits
    (1024, 4096, False): (Registers(32, 128, 1, 8), Registers(16, 128, 1, 8), Registers(16, 128, 1, 8)),
    (2048, 1024, False): (Registers(16, 128, 1, 16), Registers(16, 128, 4, 4), Registers(16, 128, 2, 8)),
    (1024, 3072, True): (Registers(16, 128, 1, 8), Registers(16, 64, 4, 4), Registers(8, 128, 2, 4)),
    (3072, 1024, False): (Registers(16, 128, 2, 8), Registers(16, 128, 3, 8), Registers(8, 64, 3, 16)),
    (1024, 151936, False): (Vector(4, 512, 2), Registers(16, 256, 1, 4), None),
    # Llama-3.1-8B, in the same order; gate and up are multiplied as one and gated apart
    (4096, 6144, False): (Vector(4, 1024, 4), SHARED, None),
    (4096, 4096, False): (Vector(4, 512, 4), Shared(16, 128, 3, 4), Shared(16, 64, 6, 4)),
    (4096, 28672, False): (Vector(2, 2048, 4), SHARED, None),
    (14336, 4096, False): (Vector(4, 2048, 4), Shared(16, 64, 6, 4), None),
    (4096, 128256, False): (Vector(4, 1024, 4), SHARED, None),
}


@cache
def plan(m: int, n: int, k: int, gated: bool) -> Plan | None:
    """For x [m, k] and n outputs; None: the library, or norm and gate apart."""
    if (k, n, gated) in TABLE:
        return TABLE[k, n, gated][0 if m == 1 else 1 if m <= 8 else 2]
    if k <= MAX_REGISTERS and k % 8 == 0:
        # 16 outputs a program, but more programs where outputs are few
        return Registers(8 if n < 1024 else 16, 128, 2, 4 if k <= 1024 else 8)
    if gated:
        return None
    if m == 1:
        return Vector(4, 1024 if k > 1024 else 512, 4)
    return SHARED if m <= 8 or (n <= 4096 and k <= 4096) else None
