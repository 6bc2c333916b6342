"""The kernels around a forward pass: `gather` builds its inputs from the seats, `commit` writes its outcome back.

Everything is int32. A decode row takes its token from `last_token[seat]`; a catch-up row from `staged_ids`.
Seat 0 is padding: it is read like any other (its table points to the null block) and never written.
Tokens behind the last row are padding too: id 0 at position 0, and a slot of -1, which means nowhere.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.step.state import GroupTable, SeatState, StepBuffers

__all__ = ["GroupTable", "SeatState", "StepBuffers", "commit", "find_slots", "gather", "gather_decode", "scatter"]


def scatter(dst: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """dst.view(-1)[index[i]] = values[i]; all int32, indices distinct."""
    if index.numel() == 0:
        return
    if on_triton(dst):
        from quire.kernels.step.triton import step

        step.scatter(dst, index, values)
    else:
        dst.view(-1)[index.long()] = values


def gather(
    state: SeatState,
    out: StepBuffers,
    seats: torch.Tensor,
    query_start: torch.Tensor,
    staged_ids: torch.Tensor,
    num_decodes: int,
    max_query_len: int,
) -> None:
    """Fill `out` for rows of any length, 0 too: ids, positions, KV slots, lengths.

    seats: [rows]; query_start: [rows + 1]; staged_ids: tokens of the rows from `num_decodes` on. `max_query_len` bounds
    the rows' lengths and the number of padding tokens from above. Nothing is read back: fit for a CUDA graph.
    """
    if on_triton(seats):
        from quire.kernels.step.triton import step

        step.gather(state, out, seats, query_start, staged_ids, num_decodes, max_query_len)
        return
    rows = seats.long()
    lens = query_start[1:] - query_start[:-1]
    row_of_token = torch.repeat_interleave(torch.arange(len(rows)), lens.long())
    offset = torch.arange(len(row_of_token)) - query_start[:-1].long()[row_of_token]
    seat_of_token = rows[row_of_token]
    positions = state.num_computed[seat_of_token] + offset
    blocks = state.block_table[seat_of_token, positions // state.block_size].long()
    slots = blocks * state.block_size + positions % state.block_size
    over = torch.zeros_like(lens)
    if state.limit is not None:
        over[:num_decodes] = _at_limit(state, rows[:num_decodes])
        slots.masked_fill_(over[row_of_token] > 0, -1)
    tokens = len(row_of_token)
    ids = torch.cat([state.last_token[rows[:num_decodes]], staged_ids[: tokens - num_decodes]])
    for buffer, values, padding in ((out.input_ids, ids, 0), (out.positions, positions, 0), (out.slots, slots, -1)):
        buffer[:tokens] = values
        buffer[tokens:] = padding
    out.seq_lens.copy_(state.num_computed[rows] + lens - over)
    _remember(state, slots, ids)


def gather_decode(state: SeatState, out: StepBuffers, seats: torch.Tensor) -> None:
    """Fill `out` for decode rows only: one token a row. Fit for a CUDA graph: it reads nothing but the seats."""
    if on_triton(seats):
        from quire.kernels.step.triton import step

        step.gather_decode(state, out, seats)
        return
    rows = seats.long()
    positions = state.num_computed[rows].long()
    slots = state.block_table[rows, positions // state.block_size].long() * state.block_size
    slots += positions % state.block_size
    ids = state.last_token[rows]
    seq_lens = positions + 1
    if state.limit is not None:
        over = _at_limit(state, rows)
        slots.masked_fill_(over, -1)
        seq_lens -= over.long()
    out.input_ids.copy_(ids)
    out.positions.copy_(positions)
    out.slots.copy_(slots)
    out.seq_lens.copy_(seq_lens)
    _remember(state, slots, ids)


def _at_limit(state: SeatState, rows: torch.Tensor) -> torch.Tensor:
    """Rows whose last token was the last there may be."""
    assert state.limit is not None
    return (state.limit[rows] > 0) & (state.num_computed[rows] + 1 >= state.limit[rows])


def _remember(state: SeatState, slots: torch.Tensor, ids: torch.Tensor) -> None:
    if state.limit is not None:
        slots, ids = slots[slots >= 0], ids[slots >= 0]
    state.token_of_slot[slots] = ids


def find_slots(
    table: GroupTable,
    seats: torch.Tensor,
    query_start: torch.Tensor | None,
    positions: torch.Tensor,
    known: torch.Tensor,
    slots: torch.Tensor,
    max_query_len: int,
) -> None:
    """Fill `slots` [tokens] for one more group of layers, once `gather` has found the positions [tokens].

    known: [tokens], the slots that it found for its own group; a token that is written nowhere there (-1) is written
    nowhere here. seats: [rows]; query_start: [rows + 1], None: as many tokens each. `max_query_len`, or 512, bounds the
    rows' lengths and the number of padding tokens from above. Nothing is read back: fit for a CUDA graph.
    """
    if on_triton(seats):
        from quire.kernels.step.triton import step

        step.find_slots(table, seats, query_start, positions, known, slots, max_query_len)
        return
    rows, size = seats.long(), table.block_size
    lens = len(positions) // len(rows) if query_start is None else (query_start[1:] - query_start[:-1]).long()
    rows = torch.repeat_interleave(rows, lens)
    tokens = len(rows)
    there = positions[:tokens].long()
    found = table.blocks[rows, there // size] * size + (there % size).int()
    slots[:tokens] = torch.where(known[:tokens] < 0, -1, found)
    slots[tokens:] = -1


def commit(
    state: SeatState,
    out_tokens: torch.Tensor,
    seats: torch.Tensor,
    seq_lens: torch.Tensor,
    sampled: torch.Tensor,
    sample_index: torch.Tensor | None,
) -> None:
    """Advance the seats after sampling: `num_computed = seq_len`, `last_token = sampled token`.

    sampled: [samples]; sample_index: [rows], the row's place in `sampled` or -1 if it does not sample
    (None: row i samples token i). out_tokens: [rows], the token or -1.
    """
    if on_triton(seats):
        from quire.kernels.step.triton import step

        step.commit(state, out_tokens, seats, seq_lens, sampled, sample_index)
        return
    rows = seats.long()
    if sample_index is None:
        tokens = sampled
    else:
        place = sample_index.long()
        tokens = torch.where(place >= 0, sampled[place.clamp(min=0)] if len(sampled) else place.int(), -1)
    out_tokens.copy_(tokens)
    real = rows > 0
    state.num_computed[rows[real]] = seq_lens[real]
    sampling = real & (tokens >= 0)
    state.last_token[rows[sampling]] = tokens[sampling].to(torch.int32)
