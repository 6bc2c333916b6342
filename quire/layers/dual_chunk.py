"""Positions of dual chunk attention (An et al., 2024): no token is farther from another than in the texts trained with.

A text is cut into chunks of c tokens, and a key has its place in its chunk for a position, j mod c. A query has three
positions. To keys of its own chunk it is at i mod c; to those of the chunk before at i mod c + c, but at most at the
farthest position; to all others at min(2c - 1, farthest). So a query comes three times, and each key meets one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.config.dual_chunk import DualChunks, read_dual_chunks
from quire.kernels.attention.rope import rotate
from quire.layers.rotary import rotary_table


class DualQueries:
    """What turns queries that are at their places in their chunks on to their two other positions."""

    def __init__(self, told: DualChunks, table: torch.Tensor, max_positions: int) -> None:
        """table: of positions 0 … farthest."""
        self.chunk = told.chunk
        place = torch.arange(told.chunk, device=table.device)
        before = (place + told.chunk).clamp(max=told.farthest) - place
        others = min(2 * told.chunk - 1, told.farthest) - place
        turns = table / table[0, 0]  # of a table that sharpens as well (YaRN) nothing but the turn
        self._before, self._others = turns[before], turns[others]
        # Scores grow with the length (YaRN; Peng et al., 2023): each query's with what it sees.
        lengths = torch.arange(1, max_positions + 1, device=table.device)
        self.scales = 1 + 0.1 * torch.log((lengths / told.trained).clamp(min=1))

    def widened(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, head_dim] at their places, positions int [tokens] in the text → [tokens, heads, 3 *
        head_dim]: as keys of the own chunk meet them, of the one before, of all others."""
        place = positions % self.chunk
        turned = (rotate(q, table, place, interleaved=False) for table in (self._before, self._others))
        return torch.cat([q, *turned], dim=-1)


def rotary_in_chunks(
    config: Mapping[str, Any], head_dim: int, max_positions: int
) -> tuple[torch.Tensor, DualQueries | None]:
    """The rotary table of a model that may have dual chunk attention, and what its queries are turned on by; None: the
    positions are the usual ones, as they are of texts no longer than a chunk."""
    told = read_dual_chunks(config)
    if told is None or max_positions <= told.usual:
        return rotary_table(config, head_dim, max_positions), None
    table = rotary_table(config, head_dim, max(told.farthest, told.chunk) + 1)
    places = torch.arange(max_positions, device=table.device) % told.chunk
    return table[places], DualQueries(told, table, max_positions)
