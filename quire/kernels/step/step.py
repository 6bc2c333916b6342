"""The kernels around a forward pass: `gather` builds its inputs from the seats, `commit` writes its outcome back.

Everything is int32. A decode row takes its token from `last_token[seat]`; a catch-up row from `staged_ids`.
Seat 0 is padding: it is read like any other (its table points to the null block) and never written.
Tokens behind the last row are padding too: id 0 at position 0, and a slot of -1, which means nowhere.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.masked import only
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
    rows, lens = seats.long(), query_start[1:] - query_start[:-1]
    row, real = _rows_of_tokens(query_start, len(out.input_ids))
    token = torch.arange(len(row), device=row.device)
    seat = rows[row]
    positions = (state.num_computed[seat] + token - query_start[row]).masked_fill_(~real, 0)
    slots = state.block_table[seat, positions // state.block_size].long() * state.block_size
    slots += positions % state.block_size
    over = torch.zeros_like(lens)
    if state.limit is not None:
        over[:num_decodes] = _at_limit(state, rows[:num_decodes])
        real &= over[row] == 0
    ids = state.last_token[seat]
    if len(staged_ids):
        staged = staged_ids[(token - num_decodes).clamp_(0, len(staged_ids) - 1)]
        ids = torch.where(token < num_decodes, ids, staged)
    out.input_ids.copy_(ids.masked_fill(token >= query_start[-1], 0))
    out.positions.copy_(positions)
    out.slots.copy_(slots.masked_fill(~real, -1))
    out.seq_lens.copy_(state.num_computed[rows] + lens - over)
    _remember(state, slots, ids, real)


def _rows_of_tokens(query_start: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of each of so many tokens, and whether it has one; else the last row stands there."""
    ends = query_start[1:].contiguous()
    token = torch.arange(tokens, dtype=ends.dtype, device=ends.device)
    row = torch.searchsorted(ends, token, right=True)
    return row.clamp(max=len(ends) - 1), row < len(ends)


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
    seq_lens, real = positions + 1, None
    out.slots.copy_(slots)
    if state.limit is not None:
        over = _at_limit(state, rows)
        out.slots.masked_fill_(over, -1)
        seq_lens -= over.long()
        real = ~over
    out.input_ids.copy_(ids)
    out.positions.copy_(positions)
    out.seq_lens.copy_(seq_lens)
    _remember(state, slots, ids, real)


def _at_limit(state: SeatState, rows: torch.Tensor) -> torch.Tensor:
    """Rows whose last token was the last there may be."""
    assert state.limit is not None
    return (state.limit[rows] > 0) & (state.num_computed[rows] + 1 >= state.limit[rows])


def _remember(state: SeatState, slots: torch.Tensor, ids: torch.Tensor, real: torch.Tensor | None) -> None:
    """real: tokens that are written; None: all."""
    if real is not None:
        slots, ids = only(real, slots, ids, lambda at: state.token_of_slot[at])
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
    if query_start is None:
        rows = rows.repeat_interleave(len(positions) // len(rows))
        real = known[: len(rows)] >= 0
    else:
        row, real = _rows_of_tokens(query_start, len(positions))
        rows, real = rows[row], real & (known >= 0)
    tokens = len(rows)
    there = positions[:tokens].long().masked_fill(~real, 0)
    found = table.blocks[rows, there // size] * size + there % size
    slots[:tokens] = found.masked_fill(~real, -1)
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
    real = rows > 0  # the others are one and the same seat, whose old values are written again
    state.num_computed[rows] = torch.where(real, seq_lens, state.num_computed[rows])
    state.last_token[rows] = torch.where(real & (tokens >= 0), tokens.int(), state.last_token[rows])
