"""The blocks of the pool as a map for people: who holds which, which are shared, which still hold what was cached."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kv.manager import KVManager, TokenOwner
from quire.types.kv import NULL_BLOCK
from quire.types.view import BlockCells

MAX_CELLS = 4096


def block_cells(kv: KVManager, owners: Sequence[TokenOwner], max_cells: int = MAX_CELLS) -> BlockCells:
    """owners: requests that hold blocks, in the order of their numbers."""
    num_blocks = kv.pool.num_usable
    owner = np.full(num_blocks + 1, -1, np.int32)
    times = np.zeros(num_blocks + 1, np.int32)
    for number in range(len(owners) - 1, -1, -1):  # the first to hold a block is its owner
        for blocks in kv.held(owners[number]):
            ids = np.fromiter([block.id for block in blocks], np.int32, len(blocks))
            owner[ids] = number
            times[ids] += 1
    times[NULL_BLOCK] = 0
    free_cached = np.zeros(num_blocks + 1, bool)
    free_cached[kv.pool.cached_ids()] = True
    free_cached &= times == 0
    per_cell = -(-num_blocks // max_cells)
    starts = np.arange(1, num_blocks + 1, per_cell)
    first_owner = np.where(times > 0, owner, np.iinfo(np.int32).max)
    found = np.minimum.reduceat(first_owner, starts) if per_cell > 1 else first_owner[1:]
    found = np.where(found == np.iinfo(np.int32).max, -1, found)
    held, shared, cached = (
        np.add.reduceat(flags.astype(np.int32), starts).tolist() for flags in (times > 0, times > 1, free_cached)
    )
    return BlockCells(num_blocks, per_cell, found.tolist(), held, shared, cached)
