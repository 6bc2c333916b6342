"""Tiles of rows that have the same adapter: a program finds the rows of one tile, which is once a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import next_power_of_2

_AREA = 1 << 14  # of rows times slots that are compared at once
_BLOCK = 512


@triton.jit(do_not_specialize=["num_rows"])
def _tiles_kernel(
    slots, tile_slots, tile_rows, num_rows, HEIGHT: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    tile = tl.program_id(0)
    kinds, offsets, places = tl.arange(0, SLOTS), tl.arange(0, BLOCK), tl.arange(0, HEIGHT)
    counts = tl.zeros([SLOTS], tl.int32)
    for begin in range(0, num_rows, BLOCK):
        own = tl.load(slots + begin + offsets, begin + offsets < num_rows, -1)
        counts += tl.sum((own[None, :] == kinds[:, None]).to(tl.int32), axis=1)
    ends = tl.cumsum((counts + HEIGHT - 1) // HEIGHT, axis=0)  # tiles of each slot lie behind those of slots before
    slot = tl.sum((ends <= tile).to(tl.int32), axis=0)
    before = tl.max(tl.where(ends <= tile, ends, 0), axis=0)
    first = (tile - before) * HEIGHT  # of the slot's rows
    done = 0
    for begin in range(0, num_rows, BLOCK):
        row = begin + offsets
        is_own = (tl.load(slots + row, row < num_rows, -1) == slot).to(tl.int32)
        place = done + tl.cumsum(is_own, axis=0) - 1 - first
        tl.store(tile_rows + tile * HEIGHT + place, row, (is_own > 0) & (place >= 0) & (place < HEIGHT))
        done += tl.sum(is_own, axis=0)
    tl.store(tile_rows + tile * HEIGHT + places, tl.full([HEIGHT], -1, tl.int32), first + places >= done)
    tl.store(tile_slots + tile, tl.where(slot < SLOTS, slot, -1))


def tiles(slots: torch.Tensor, num_slots: int, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """slots int32 [rows], in [0, num_slots] → as `kernels.low_rank.rows.Tiles` has them, of `height` rows each."""
    num_rows, kinds = len(slots), next_power_of_2(num_slots + 1)
    most = min(num_rows, (num_rows + (num_slots + 1) * (height - 1)) // height)
    tile_slots = torch.empty(most, dtype=torch.int32, device=slots.device)
    tile_rows = torch.empty((most, height), dtype=torch.int32, device=slots.device)
    if most:
        _tiles_kernel[(most,)](
            slots, tile_slots, tile_rows, num_rows, HEIGHT=height, SLOTS=kinds,
            BLOCK=max(min(_BLOCK, _AREA // kinds), 16), num_warps=4,
        )  # fmt: skip
    return tile_slots, tile_rows
