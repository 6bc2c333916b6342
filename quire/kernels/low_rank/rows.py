"""Which adapter each row of a product has, and the tiles that kernels work through."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.kernels.dispatch import on_triton

_MANY_ROWS = 1024
LOW, HIGH = 16, 64  # rows of a tile; with many rows tiles are high, so that factors are read less often


class Tiles(NamedTuple):
    """Rows of one adapter each."""

    slots: torch.Tensor  # int32 [tiles]; 0: the tile is empty
    rows: torch.Tensor  # int32 [tiles, height]; -1: none


class AdapterRows(NamedTuple):
    """slots: int32 [rows], 0 for a row without an adapter. For kernels `tiles`, for torch `members`: of each slot that
    is there the rows, int64."""

    slots: torch.Tensor
    tiles: Tiles | None = None
    members: tuple[tuple[int, torch.Tensor], ...] = ()


def adapter_rows(slots: torch.Tensor, num_slots: int) -> AdapterRows:
    """Group rows by their adapters. For kernels nothing is read back: the number of tiles is the most there can be.

    Shapes:
        slots: int32 [rows], in [0, num_slots].
    """
    if on_triton(slots):
        return AdapterRows(slots, tiles=_tiles(slots, num_slots))
    there = [slot for slot in slots.unique().tolist() if slot]
    return AdapterRows(slots, members=tuple((slot, (slots == slot).nonzero()[:, 0]) for slot in there))


def _tiles(slots: torch.Tensor, num_slots: int) -> Tiles:
    height = HIGH if len(slots) > _MANY_ROWS else LOW
    most = -(-len(slots) // height) + num_slots
    ordered, order = slots.sort(stable=True)
    numbers = torch.arange(num_slots + 2, dtype=torch.int32, device=slots.device)
    starts = torch.searchsorted(ordered, numbers)  # of each slot's rows, in order; those of slot 0 come first
    counts = (starts[1:] - starts[:-1] + height - 1) // height  # tiles of each slot
    counts[:1] = 0
    ends = counts.cumsum(0)
    tile = torch.arange(most, device=slots.device)
    slot = torch.searchsorted(ends, tile, right=True)
    inside = slot <= num_slots
    slot = slot.clamp_(max=num_slots)
    first = starts[slot] + (tile - ends[slot] + counts[slot]) * height
    places = first[:, None] + torch.arange(height, device=slots.device)
    is_row = (places < starts[slot + 1][:, None]) & inside[:, None]
    rows = torch.where(is_row, order[places.clamp_(max=len(slots) - 1)], -1)
    return Tiles((slot * inside).to(torch.int32), rows.to(torch.int32))
