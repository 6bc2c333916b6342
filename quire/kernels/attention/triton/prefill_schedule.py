"""Which tiles of prompt rows there are, the longest first: listed on the device once a step, for all layers.

A tile is TOKENS consecutive query tokens of one row. Its rank is the number of tiles of its size that its row has
before it: what it has to read, nearly. The list falls by rank, but only to a precision of LEVEL ranks: within a level
tiles stand by row, so that those which read the same K and V run together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.triton.decode_schedule import _publish
from quire.kernels.triton.launch import cdiv, has_pdl
from quire.kernels.triton.launches import launch

ITEM = 4  # int32 a tile: first token, counted from the batch's first; tokens from there to the row's end (0: no tile);
# the row's tokens in the cache; its seat
LEVEL_TOKENS = 256
BLOCK = 64


@triton.jit(
    do_not_specialize=["num_rows", "num_items"],
    do_not_specialize_on_alignment=["seats_ptr", "query_start_ptr", "seq_lens_ptr"],
)
def _tiles_kernel(
    seats_ptr, query_start_ptr, seq_lens_ptr, items_ptr, num_rows, num_items,
    TOKENS: tl.constexpr, LEVEL: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, j) lists tiles BLOCK * j … of row i."""
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    start = tl.load(query_start_ptr + row)
    queries = tl.load(query_start_ptr + row + 1) - start
    seq_len = tl.load(seq_lens_ptr + row)
    tile = tl.program_id(1) * BLOCK + index
    least = (seq_len - queries) // TOKENS
    tiles = tl.cdiv(queries, TOKENS)
    rank = least + tile
    level = rank // LEVEL * LEVEL
    above = level + LEVEL
    place = tl.minimum(least + tiles, above) - 1 - rank  # behind the row's own tiles of the level
    used = 0
    for base in range(0, num_rows, BLOCK):
        other = base + index
        there = other < num_rows
        count = tl.load(query_start_ptr + other + 1, there, 0) - tl.load(query_start_ptr + other, there, 0)
        begin = (tl.load(seq_lens_ptr + other, there, 0) - count) // TOKENS
        count = tl.cdiv(count, TOKENS)
        used += tl.sum(count, axis=0)
        end = (begin + count)[None, :]
        higher = tl.minimum(tl.maximum(end - above[:, None], 0), count[None, :])  # tiles of higher levels
        same = tl.minimum(tl.maximum(end - level[:, None], 0), count[None, :]) - higher
        place += tl.sum(higher + tl.where((other < row)[None, :], same, 0), axis=1)
    at = items_ptr + place * ITEM
    there = tile < tiles
    tl.store(at, start - tl.load(query_start_ptr) + tile * TOKENS, there)
    tl.store(at + 1, queries - tile * TOKENS, there)
    tl.store(at + 2, seq_len, there)
    tl.store(at + 3, tl.load(seats_ptr + row), there)
    if tl.program_id(1) == 0:
        for item in range(used + row, num_items, num_rows):
            tl.store(items_ptr + item * ITEM + tl.arange(0, ITEM), tl.zeros([ITEM], tl.int32))
    _publish(PDL)


def tiles(
    seats: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    max_query_len: int,
    tokens: int,
) -> torch.Tensor:
    """The list, int32 [as many as `num_tokens` query tokens in tiles of `tokens` can make, ITEM]."""
    num_rows = len(seats)
    items = torch.empty((num_tokens // tokens + num_rows, ITEM), dtype=torch.int32, device=seats.device)
    pdl = has_pdl(seats.device)
    launch(_tiles_kernel, (num_rows, cdiv(cdiv(max_query_len, tokens), BLOCK)),
        seats, query_start, seq_lens, items, num_rows, len(items), TOKENS=tokens, LEVEL=max(LEVEL_TOKENS // tokens, 1),
        ITEM=ITEM, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return items
