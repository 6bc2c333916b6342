"""The factors of the adapters of one matrix, as kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

RANKS_A_STEP = 16  # what kernels multiply at a time: ranks are filled up with zeros to a multiple of it
OUTPUTS_A_BLOCK = 128


class Factors(NamedTuple):
    """Of one matrix [n, k], those of every slot. A matrix that stands for several, one part of its rows behind the
    other, has as many `down`: part p of the outputs is made of lines [p · room, p · room + rank) of them."""

    down: torch.Tensor  # [slots, parts * room, k]
    up: torch.Tensor  # [slots, n, room]
    gains: torch.Tensor  # float32 [slots, n]
    ranks: torch.Tensor  # int32 [slots]; 0: the adapter leaves the matrix as it is
    ends: tuple[int, ...]  # of the parts, in the rows
    blocks: torch.Tensor  # int32 [blocks, 3]: first row, end and part of what a kernel's program writes

    @property
    def room(self) -> int:
        """Of ranks."""
        return self.up.shape[2]


def blocks_of(ends: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """`Factors.blocks`: none of them reaches into two parts."""
    found, begin = [], 0
    for part, end in enumerate(ends):
        found += [(row, min(row + OUTPUTS_A_BLOCK, end), part) for row in range(begin, end, OUTPUTS_A_BLOCK)]
        begin = end
    return found
