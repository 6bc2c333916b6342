"""A number a head that attention's scores get: sinks, which are learned, and slopes, which follow from the heads."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from quire.distributed.topology import ALONE, Topology
from quire.layers.targets import Target


class HeadTerms(nn.Module):
    """float32 [heads], of which a rank has those of its heads.

    is_stored: checkpoints have them, called as this module.
    """

    values: torch.Tensor

    def __init__(self, values: torch.Tensor, *, is_stored: bool = True) -> None:
        super().__init__()
        self.is_stored, self._heads = is_stored, len(values)
        if is_stored:
            self.values = nn.Parameter(values.float(), requires_grad=False)
        else:
            self.register_buffer("values", values.float(), persistent=False)
        self.share_with(ALONE)

    def share_with(self, topology: Topology) -> None:
        """Keep those of this rank's heads. Raises ConfigError if heads do not divide."""
        share = topology.lines(self._heads, self._heads, "num_attention_heads")
        self._lines = slice(share.begin, share.end)
        if len(self.values) != share.room:
            self.values.data = self.values.data[self._lines].clone()

    def stored(self, name: str) -> Iterator[Target]:
        if self.is_stored:
            yield Target(name, (self._heads,), self.values.detach(), part=(self._lines,))


def alibi_slopes(heads: int, most: float = 8.0) -> list[float]:
    """2^(-most · i / heads) for heads 1, 2, … of a power of two (ALiBi, Press et al., 2021); of another number, those
    of the next lower power, and then every other one of the next higher."""
    whole = 2 ** math.floor(math.log2(heads))

    def of(count: int) -> list[float]:
        return [2.0 ** (-most * (head + 1) / count) for head in range(count)]

    return of(whole) + of(2 * whole)[::2][: heads - whole]


def alibi_slopes_of_mpt(heads: int, most: float) -> list[float]:
    """The same for a power of two; of another number, every other one of the next higher power, and then the rest."""
    whole = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-most * (head + 1) / whole) for head in range(whole)]
    return slopes if whole == heads else (slopes[1::2] + slopes[::2])[:heads]
