"""Which adapter each row of a product has, and the tiles that kernels work through."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.gemm.decode_gemm import has_gluon

_MANY_ROWS = 1024
LOW, HIGH = 16, 64  # rows of a tile; with many rows tiles are high, so that factors are read less often
IN_REGISTERS = 8  # rows of a tile where kernels keep them in registers


class Tiles(NamedTuple):
    """Rows of one adapter each, or without one; those that are empty come last."""

    slots: torch.Tensor  # int32 [tiles]; -1: the tile is empty
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
        from quire.kernels.low_rank.triton import rows

        height = HIGH if len(slots) > _MANY_ROWS else LOW
        if has_gluon(slots.device):
            height = IN_REGISTERS
        return AdapterRows(slots, Tiles(*rows.tiles(slots, num_slots, height)))
    there = [slot for slot in slots.unique().tolist() if slot]
    return AdapterRows(slots, members=tuple((slot, (slots == slot).nonzero()[:, 0]) for slot in there))
