"""Which tokens of which row a block of the latent decode kernel attends to: made on the device once a step.

All rows' tiles, one row behind the other, are dealt out to the programs as ranges of the same length: a program begins
and ends amid a row, and has a piece of each row that its range touches. So any lengths of any number of rows keep all
programs equally busy. Where whole rows, or rows cut into equal shares, keep them busy nearly as well, each row begins
with a program of its own: pieces of a row have to be written, read and weighed together.

Along all pieces either the program or the row goes up by one, so that a piece's place in the list is their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.attention.triton.decode_schedule import _publish
from quire.kernels.triton.launch import has_pdl

ITEM = tl.constexpr(8)  # int32 a piece, so that a program fetches its own from one sector
SLACK = tl.constexpr(16)  # a range may be longer by one in so many if rows then begin with programs


@dataclass(frozen=True, slots=True)
class Pieces:
    """items int32 [rows + programs, ITEM]: row, seat, first token, end, whether the program goes on with the next one,
    pieces of the row. heads int32 [programs]: a program's first piece, -1: none. places int32 [rows, 2]: a row's first
    piece, and how many there are."""

    items: torch.Tensor
    heads: torch.Tensor
    places: torch.Tensor


@triton.jit
def _tiles(seq_lens_ptr, row, there, TILE: tl.constexpr):
    """Of a row; one without tokens has one, so that something is written."""
    length = tl.load(seq_lens_ptr + row, there, 0)
    return tl.where(there, tl.maximum(tl.cdiv(length, TILE), 1), 0)


@triton.jit(
    do_not_specialize=["num_rows", "programs", "min_length"],
    do_not_specialize_on_alignment=["seats_ptr", "seq_lens_ptr", "items_ptr", "heads_ptr", "places_ptr"],
)
def _pieces_kernel(
    seats_ptr, seq_lens_ptr, items_ptr, heads_ptr, places_ptr, num_rows, programs, min_length,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i lists the pieces of row i."""
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    all_tiles = 0
    for base in range(0, num_rows, BLOCK):
        all_tiles += tl.sum(_tiles(seq_lens_ptr, base + index, base + index < num_rows, TILE), axis=0)
    length = tl.maximum(tl.cdiv(all_tiles, programs), min_length)
    longer = length + length // SLACK
    shares = 0
    for base in range(0, num_rows, BLOCK):
        tiles = _tiles(seq_lens_ptr, base + index, base + index < num_rows, TILE)
        shares += tl.sum(tl.cdiv(tiles, longer), axis=0)
    aligned = shares <= programs
    length = tl.where(aligned, longer, length)
    start = 0
    for base in range(0, num_rows, BLOCK):
        tiles = _tiles(seq_lens_ptr, base + index, base + index < row, TILE)
        start += tl.sum(tl.where(aligned, tl.cdiv(tiles, length) * length, tiles), axis=0)

    seq_len, seat = tl.load(seq_lens_ptr + row), tl.load(seats_ptr + row)
    tiles = tl.maximum(tl.cdiv(seq_len, TILE), 1)
    first = start // length
    pieces = (start + tiles - 1) // length - first + 1
    even = tl.where(aligned, tl.cdiv(tiles, pieces), length)  # of a share
    for base in range(0, pieces, BLOCK):
        piece = base + index
        there = piece < pieces
        program = first + piece
        begin = tl.where(aligned, piece * even, tl.maximum(program * length - start, 0))
        end = tl.where(aligned, begin + even, (program + 1) * length - start)
        more = (end > tiles) & (row + 1 < num_rows) & (aligned == 0)
        at = items_ptr + (program + row) * ITEM
        tl.store(at, row, there)
        tl.store(at + 1, seat, there)
        tl.store(at + 2, begin * TILE, there)
        tl.store(at + 3, tl.minimum(end * TILE, seq_len), there)
        tl.store(at + 4, more.to(tl.int32), there)
        tl.store(at + 5, pieces, there)
        tl.store(heads_ptr + program, program + row, there & (program * length >= start))
    if row + 1 == num_rows:
        for program in range(first + pieces, programs):
            tl.store(heads_ptr + program, -1)
    tl.store(places_ptr + row * 2, first + row)
    tl.store(places_ptr + row * 2 + 1, pieces)
    _publish(PDL)


def pieces(seats: torch.Tensor, seq_lens: torch.Tensor, programs: int, tile: int, min_length: int) -> Pieces:
    """Of rows int32 [rows] with so many tokens, in tiles of `tile`, at least `min_length` of them a program."""
    num_rows, device = len(seq_lens), seq_lens.device
    items = torch.empty((num_rows + programs, ITEM.value), dtype=torch.int32, device=device)
    heads = torch.empty(programs, dtype=torch.int32, device=device)
    places = torch.empty((num_rows, 2), dtype=torch.int32, device=device)
    pdl = has_pdl(device)
    _pieces_kernel[(num_rows,)](
        seats, seq_lens, items, heads, places, num_rows, programs, min_length, TILE=tile, BLOCK=256, PDL=pdl,
        num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return Pieces(items, heads, places)
