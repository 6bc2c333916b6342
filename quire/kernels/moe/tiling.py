"""The order in which kernels work through what tokens want of experts: by expert, in tiles of few rows.

Shapes follow from the number of tokens alone: a table has room for the most tiles that there can be, and those that are
none say so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiling(NamedTuple):
    """order int32 [tokens · top_k]: choices (token · top_k + place), expert after expert, those of tokens that are
    nobody's left out; what stands behind the last is anything.

    tiles int32 [3, most]: each tile's expert, -1 for none; its first place in `order`; its rows, at most `rows`.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    rows: int


def most_tiles(choices: int, experts: int, rows: int) -> int:
    """That so many choices can make: of each expert's, the last may not be full."""
    return max(min(choices, min(experts, choices) + choices // rows), 1)


def tile_reference(chosen: torch.Tensor, experts: int, rows: int) -> Tiling:
    """chosen int32 [tokens, top_k]: experts, or -1. It never waits for the device."""
    flat = chosen.flatten().long()
    keys = torch.where(flat < 0, experts, flat)
    order = keys.argsort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, keys, torch.ones_like(keys))[:-1]
    places, tiles = counts.cumsum(0) - counts, (counts + rows - 1) // rows
    ends = tiles.cumsum(0)
    number = torch.arange(most_tiles(len(flat), experts, rows), device=flat.device)
    expert = torch.searchsorted(ends, number, right=True).clamp(max=experts - 1)
    inside = (number - ends[expert] + tiles[expert]) * rows
    there = number < ends[-1]
    table = (torch.where(there, expert, -1), places[expert] + inside, (counts[expert] - inside).clamp(0, rows))
    return Tiling(order.to(torch.int32), torch.stack(table).to(torch.int32), rows)
