"""The factors of the adapters of one matrix, as kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

RANKS_A_STEP = 16  # what kernels multiply at a time: there is room for a multiple of it


class Factors(NamedTuple):
    """Of one matrix [n, k], those of every slot. A matrix that stands for several, one part of its rows behind the
    other, has as many `down`: part p of the outputs is made of lines [p · room, p · room + rank) of them.

    Lines from an adapter's rank on are not read, nor gains of one that has none.
    """

    down: torch.Tensor  # [slots, parts * room, k]
    up: torch.Tensor  # [slots, room, n]
    gains: torch.Tensor  # float32 [slots, n]
    ranks: torch.Tensor  # int32 [slots, 2]: an adapter's, 0 if it leaves the matrix as it is; and 1 if it has gains
    edges: torch.Tensor  # int32 [parts + 1]: 0, and `ends`
    ends: tuple[int, ...]  # of the parts, in the rows

    @property
    def room(self) -> int:
        """Of ranks."""
        return self.up.shape[1]
