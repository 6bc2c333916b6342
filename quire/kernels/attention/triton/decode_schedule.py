"""Which program of the decode kernels does what: made on the device once a step, for all layers.

Rows are cut into shares of about the same length, so that one long row among many short ones does not finish alone;
how many there are at most follows from the number of rows. A row's shares are neighbours in the list and the longest
stand first, so that short ones fill the end (Graham's longest-processing-time rule). Prefixes that rows share are cut
likewise, a tile of member rows at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.attention.scores import PLAIN, Scores
from quire.kernels.attention.triton.operand import first_seen
from quire.kernels.triton.launch import has_pdl

ITEM = 8  # int32 a list entry, so that a program fetches its own from one sector


@triton.jit
def _publish(PDL: tl.constexpr):
    """Results are visible before this program ends, and the next kernel may not start sooner: it may read them ahead
    of its wait."""
    if PDL:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def _cut(seq_len, first_len, shared, length, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """A row's first token that is attended to, its tiles from there on, and how many shares these make. first_len:
    tokens that its first query sees, if it has several."""
    first = shared
    if WINDOW > 0:
        first = first_seen(tl.maximum(first_len - 1, 0), WINDOW, CHUNKED) // TILE * TILE
    tiles = tl.cdiv(seq_len - first, TILE)
    return first, tiles, tl.cdiv(tiles, length)


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "budget", "min_length"],
    do_not_specialize_on_alignment=[
        "seats_ptr", "seq_lens_ptr", "first_lens_ptr", "shared_ptr", "items_ptr", "row_prefix_ptr", "places_ptr",
    ],
)  # fmt: skip
def _rows_kernel(
    seats_ptr, seq_lens_ptr, first_lens_ptr, shared_ptr, items_ptr, row_prefix_ptr, places_ptr, num_rows, num_items,
    budget, min_length, TILE: tl.constexpr, WINDOW: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr,
    PREFIX: tl.constexpr, DRAFTED: tl.constexpr, PLACED: tl.constexpr, PDL: tl.constexpr, CHUNKED: tl.constexpr,
    LENGTHS: tl.constexpr,
):  # fmt: skip
    """Program i lists the shares of row i, behind those of all rows with longer ones."""
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    all_tiles = 0
    for base in range(0, num_rows, BLOCK):
        other = base + index
        there = other < num_rows
        shared = tl.load(shared_ptr + other, there, 0) if PREFIX else other * 0
        length = tl.load(seq_lens_ptr + other, there, 0)
        first_length = tl.load(first_lens_ptr + other, there, 0) if DRAFTED else length
        _, tiles, _ = _cut(length, first_length, shared, 1, TILE, WINDOW, CHUNKED)
        all_tiles += tl.sum(tl.where(there, tiles, 0), axis=0)
    longest = tl.maximum(tl.cdiv(all_tiles, budget), min_length)  # of a share: so at most num_rows + budget shares

    seq_len = tl.load(seq_lens_ptr + row)
    first_len = tl.load(first_lens_ptr + row) if DRAFTED else seq_len
    own_shared = tl.load(shared_ptr + row) if PREFIX else row * 0
    first, own_tiles, own_shares = _cut(seq_len, first_len, own_shared, longest, TILE, WINDOW, CHUNKED)
    per_share = tl.cdiv(own_tiles, own_shares)
    before = 0
    used = 0
    for base in range(0, num_rows, BLOCK):
        other = base + index
        there = other < num_rows
        shared = tl.load(shared_ptr + other, there, 0) if PREFIX else other * 0
        length = tl.load(seq_lens_ptr + other, there, 1)
        first_length = tl.load(first_lens_ptr + other, there, 1) if DRAFTED else length
        _, tiles, shares = _cut(length, first_length, shared, longest, TILE, WINDOW, CHUNKED)
        shares = tl.where(there, shares, 0)
        size = tl.cdiv(tiles, tl.maximum(shares, 1))
        used += tl.sum(shares, axis=0)
        ahead = (size > per_share) | ((size == per_share) & (other < row))
        before += tl.sum(tl.where(ahead, shares, 0), axis=0)

    seat = tl.load(seats_ptr + row)
    seen_from = first_seen(tl.maximum(first_len - 1, 0), WINDOW, CHUNKED) if WINDOW > 0 else row * 0
    for base in range(0, own_shares, BLOCK):
        share = base + index
        at, there = items_ptr + (before + share) * ITEM, share < own_shares
        begin = first + share * per_share * TILE
        tl.store(at, row, there)
        tl.store(at + 1, seat, there)
        tl.store(at + 2, begin, there)
        tl.store(at + 3, tl.minimum(begin + per_share * TILE, seq_len), there)
        tl.store(at + 4, share, there)
        tl.store(at + 5, own_shares, there)
        tl.store(at + 6, seen_from, there)
        if LENGTHS:
            tl.store(at + 7, first_len, there)
    for item in range(used + row, num_items, num_rows):  # no work: no row, and nothing to read
        tl.store(items_ptr + item * ITEM + tl.arange(0, ITEM), tl.where(tl.arange(0, ITEM) == 0, -1, 0))
    if PREFIX:
        tl.store(row_prefix_ptr + row * 4 + tl.arange(0, 4), tl.zeros([4], tl.int32), own_shared == 0)
    if PLACED:
        tl.store(places_ptr + row * 2, before)
        tl.store(places_ptr + row * 2 + 1, own_shares)
    _publish(PDL)


@triton.jit(
    do_not_specialize=["num_tiles", "programs", "min_length"],
    do_not_specialize_on_alignment=["tiles_ptr", "members_ptr", "items_ptr", "row_prefix_ptr", "count_ptr"],
)
def _prefixes_kernel(
    tiles_ptr, members_ptr, items_ptr, row_prefix_ptr, count_ptr, num_tiles, programs, min_length,
    TILE: tl.constexpr, ITEM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i lists the shares of tile i of a prefix, and tells its member rows where their results will be."""
    tile = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    work = 0
    used_tiles = 0
    for base in range(0, num_tiles, BLOCK):
        at, there = tiles_ptr + (base + index) * 4, base + index < num_tiles
        used = tl.load(at + 2, there, 0) > 0
        work += tl.sum(tl.where(used, tl.cdiv(tl.load(at + 3, there, 0), TILE), 0), axis=0)
        used_tiles += tl.sum(used.to(tl.int32), axis=0)
    # Shares of this many TILEs: no more of them than there are programs, unless there are more tiles than that.
    length = tl.maximum(tl.cdiv(work, tl.maximum(programs - used_tiles, 1)), min_length)
    before = 0
    places = 0
    count = 0
    for base in range(0, num_tiles, BLOCK):
        at, there = tiles_ptr + (base + index) * 4, base + index < num_tiles
        members = tl.load(at + 2, there, 0)
        shares = tl.where(members > 0, tl.cdiv(tl.cdiv(tl.load(at + 3, there, 0), TILE), length), 0)
        count += tl.sum(shares, axis=0)
        ahead = base + index < tile
        before += tl.sum(tl.where(ahead, shares, 0), axis=0)
        places += tl.sum(tl.where(ahead, shares * members, 0), axis=0)
    if tile == 0:
        tl.store(count_ptr, count)

    seat, first_member = tl.load(tiles_ptr + tile * 4), tl.load(tiles_ptr + tile * 4 + 1)
    members, tokens = tl.load(tiles_ptr + tile * 4 + 2), tl.load(tiles_ptr + tile * 4 + 3)
    if members > 0:
        shares = tl.cdiv(tl.cdiv(tokens, TILE), length)
        per_share = tl.cdiv(tl.cdiv(tokens, TILE), shares) * TILE
        for base in range(0, shares, BLOCK):
            share = base + index
            at, there = items_ptr + (before + share) * ITEM, share < shares
            tl.store(at, seat, there)
            tl.store(at + 1, first_member, there)
            tl.store(at + 2, members, there)
            tl.store(at + 3, share * per_share, there)
            tl.store(at + 4, tl.minimum(share * per_share + per_share, tokens), there)
            tl.store(at + 5, places + share * members, there)
        member = tl.arange(0, ROWS)
        row = tl.load(members_ptr + first_member + member, member < members, 0)
        at = row_prefix_ptr + row * 4
        tl.store(at, places + member, member < members)
        tl.store(at + 1, members, member < members)
        tl.store(at + 2, shares, member < members)
    _publish(PDL)


def rows(
    seats: torch.Tensor,
    seq_lens: torch.Tensor,
    shared: torch.Tensor | None,
    budget: int,
    tile: int,
    min_length: int,
    scores: Scores,
    first_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The list of shares, int32 [rows + budget, ITEM]: row (-1: none), seat, first token, end, share, shares, first
    token seen, and with `first_lens` or slopes the tokens that the row's first query sees; and with `shared` [rows],
    what `prefixes` fills: for each row int32 [rows, 4]."""
    row_prefix = None
    if shared is not None:
        row_prefix = torch.empty((len(seq_lens), 4), dtype=torch.int32, device=seq_lens.device)
    items = _list_rows(seats, seq_lens, shared, row_prefix, None, budget, tile, min_length, scores, first_lens)
    return items, row_prefix


def placed_rows(
    seats: torch.Tensor,
    seq_lens: torch.Tensor,
    budget: int,
    tile: int,
    min_length: int,
    first_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same list without windows and prefixes; and where each row's shares begin in it, and how many there are,
    int32 [rows, 2]."""
    places = torch.empty((len(seq_lens), 2), dtype=torch.int32, device=seq_lens.device)
    return _list_rows(seats, seq_lens, None, None, places, budget, tile, min_length, PLAIN, first_lens), places


def _list_rows(
    seats: torch.Tensor,
    seq_lens: torch.Tensor,
    shared: torch.Tensor | None,
    row_prefix: torch.Tensor | None,
    places: torch.Tensor | None,
    budget: int,
    tile: int,
    min_length: int,
    scores: Scores,
    first_lens: torch.Tensor | None,
) -> torch.Tensor:
    num_rows = len(seq_lens)
    items = torch.empty((num_rows + budget, ITEM), dtype=torch.int32, device=seq_lens.device)
    pdl = has_pdl(seq_lens.device)
    _rows_kernel[(num_rows,)](
        seats, seq_lens, seq_lens if first_lens is None else first_lens, items if shared is None else shared, items,
        items if row_prefix is None else row_prefix, items if places is None else places, num_rows, len(items), budget,
        min_length, TILE=tile, WINDOW=scores.window, ITEM=ITEM, BLOCK=256, PREFIX=shared is not None,
        DRAFTED=first_lens is not None, PLACED=places is not None, PDL=pdl, CHUNKED=scores.chunked,
        LENGTHS=first_lens is not None or scores.slopes, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return items


def prefixes(
    tiles: torch.Tensor,
    members: torch.Tensor,
    row_prefix: torch.Tensor,
    programs: int,
    tile_rows: int,
    tile: int,
    min_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The list of prefix shares, int32 [tiles + programs, ITEM]: leader's seat, first place in `members`, members,
    first token, end, place of the first member's result; and their number, int32 [1]. Fills `row_prefix` for member
    rows: place of the first result, places from one share's to the next, shares."""
    items = torch.empty((len(tiles) + programs, ITEM), dtype=torch.int32, device=tiles.device)
    count = torch.empty(1, dtype=torch.int32, device=tiles.device)
    pdl = has_pdl(tiles.device)
    _prefixes_kernel[(len(tiles),)](
        tiles, members, items, row_prefix, count, len(tiles), programs, min_length, TILE=tile, ITEM=ITEM,
        ROWS=triton.next_power_of_2(tile_rows), BLOCK=256, PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return items, count
