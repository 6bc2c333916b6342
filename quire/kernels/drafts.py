"""Steps whose decode rows bring drafts: `gather_drafted` builds their inputs, `commit_drafted` keeps what was right.

A draft is right if it equals what is sampled at its place, with everything that a plain step would have sampled by: the
logits behind the tokens before it and the request's own number for that position. So the tokens are those of plain
steps, and as random as these (Leviathan et al., 2023, whose rejection sampling comes to the same for drafts that have
no distribution of their own). The first draft that is not right is replaced by what was sampled.

Everything is int32, and nothing is read back: all of it is fit for a CUDA graph. Outcomes are [rows, width + 2]: the
tokens, -1 behind those that count; the drafts that were compared; how many of them were right.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.draft_state import DraftBuffers, DraftState
from quire.kernels.masked import only
from quire.kernels.step.state import SeatState, StepBuffers

__all__ = ["DraftBuffers", "DraftState", "commit_drafted", "gather_drafted", "probe", "propose_ngram"]

_AT_ONCE = 1 << 22  # tokens of texts that are looked through at once


def gather_drafted(
    state: SeatState, drafts: DraftState, out: StepBuffers, more: DraftBuffers, seats: torch.Tensor
) -> None:
    """Fill `out` and `more` for decode rows with drafts. seats: [rows]."""
    if on_triton(seats):
        from quire.kernels.triton import drafts as kernels

        kernels.gather_drafted(state, drafts, out, more, seats)
        return
    assert state.limit is not None
    rows, width = seats.long(), drafts.width
    computed, limit = state.num_computed[rows].long(), state.limit[rows].long()
    is_over = (limit > 0) & (computed + 1 >= limit)
    count = torch.minimum(drafts.count[rows].long() * drafts.may_draft[rows], limit - computed - 2).clamp(min=0)
    place = torch.arange(width, device=seats.device)
    offset = torch.minimum(place, count.unsqueeze(1))
    positions = computed.unsqueeze(1) + offset
    is_there = (place <= count.unsqueeze(1)) & ~is_over.unsqueeze(1)
    ids = torch.cat([state.last_token[rows].unsqueeze(1), drafts.tokens[rows]], 1).masked_fill(~is_there, 0)
    blocks = state.block_table[rows.unsqueeze(1), positions // state.block_size].long()
    slots = blocks * state.block_size + positions % state.block_size
    first = computed + 1 - is_over.long()
    out.input_ids.copy_(ids.flatten())
    out.positions.copy_(positions.flatten())
    out.slots.copy_(slots.masked_fill(~is_there, -1).flatten())
    out.seq_lens.copy_(first + count)
    more.seats.copy_(seats.repeat_interleave(width))
    more.lengths.copy_((first.unsqueeze(1) + offset).flatten())
    more.first_lens.copy_(first)
    more.used.copy_(count.masked_fill(is_over, -1))
    index, ids = only(is_there.flatten(), slots.flatten(), ids.flatten(), lambda at: state.token_of_slot[at])
    state.token_of_slot[index] = ids


def commit_drafted(
    state: SeatState,
    outcome: torch.Tensor,
    more: DraftBuffers,
    seats: torch.Tensor,
    input_ids: torch.Tensor,
    sampled: torch.Tensor,
) -> None:
    """Advance the seats by the drafts that are right and the token behind them. input_ids, sampled: [rows * width]."""
    if on_triton(seats):
        from quire.kernels.triton import drafts as kernels

        kernels.commit_drafted(state, outcome, more, seats, input_ids, sampled)
        return
    rows, used = seats.long(), more.used.unsqueeze(1)
    width = len(input_ids) // len(rows)
    tokens, place = sampled.view(-1, width), torch.arange(width, device=seats.device)
    is_right = (tokens[:, :-1] == input_ids.view(-1, width)[:, 1:]) & (place[:-1] < used)
    matched = is_right.int().cumprod(1).sum(1)
    count = (matched + 1).masked_fill(more.used < 0, 0)
    outcome[:, :width] = tokens.masked_fill(place >= count.unsqueeze(1), -1)
    outcome[:, width] = more.used.clamp(min=0)
    outcome[:, width + 1] = matched
    live = (rows > 0) & (count > 0)
    computed, last = (more.first_lens - 1 + count).int(), tokens.gather(1, matched.unsqueeze(1))[:, 0]
    state.num_computed[rows] = torch.where(live, computed, state.num_computed[rows])
    state.last_token[rows] = torch.where(live, last, state.last_token[rows])


def probe(
    drafts: DraftState, outcome: torch.Tensor, seats: torch.Tensor, tokens: torch.Tensor, num_decodes: int
) -> None:
    """The outcome of a step without drafts: compares the first that each decode row would have had.

    tokens: [rows], as `commit` tells them; rows from `num_decodes` on catch up and had none.
    """
    if on_triton(seats):
        from quire.kernels.triton import drafts as kernels

        kernels.probe(drafts, outcome, seats, tokens, num_decodes)
        return
    rows, place = seats.long(), torch.arange(len(seats), device=seats.device)
    compared = (drafts.count[rows] > 0) & (drafts.may_draft[rows] > 0) & (place < num_decodes)
    outcome[:, 0] = tokens
    outcome[:, drafts.width] = compared
    outcome[:, drafts.width + 1] = compared & (drafts.tokens[rows, 0] == tokens)


def propose_ngram(
    state: SeatState, drafts: DraftState, seats: torch.Tensor, keys: torch.Tensor, longest: int, shortest: int
) -> None:
    """Draft what followed the last time that the text held what it ends with now.

    Of the places where the last `longest` tokens stand in the request's text (prompt and output), the latest counts;
    if there is none, those of one token fewer, down to `shortest`; else nothing is drafted. A text that repeats itself
    with a period shorter than the draft is drafted to go on so. (Prompt lookup decoding, Saxena, 2023.)
    keys: [rows] zeros, and so again afterwards.
    """
    if on_triton(seats):
        from quire.kernels.triton import drafts as kernels

        kernels.propose_ngram(state, drafts, seats, keys, longest, shortest)
        return
    longest_text = int(state.num_computed[seats.long()].max()) if seats.is_cpu else _history_len(state)
    for rows in torch.split(seats.long(), max(1, _AT_ONCE // max(longest_text, 1))):
        _propose(state, drafts, rows, longest_text, longest, shortest)


def _history_len(state: SeatState) -> int:
    """Tokens the longest request can have."""
    return state.block_table.shape[1] * state.block_size


def _propose(state: SeatState, drafts: DraftState, rows: torch.Tensor, width: int, longest: int, shortest: int) -> None:
    """rows: int64 seats. width: their texts have no more tokens than that whose KV is there."""
    count = state.num_computed[rows].long().unsqueeze(1)  # the last token's place
    place = torch.arange(width, device=rows.device)
    slots = state.block_table[rows.unsqueeze(1), place // state.block_size].long() * state.block_size
    last = state.last_token[rows].unsqueeze(1)
    text = torch.where(place < count, state.token_of_slot[slots + place % state.block_size], last)
    text = torch.cat([text, last], 1)
    equal = place < count
    matched = torch.zeros_like(text[:, :-1])  # tokens that a match which ends at each place has
    for back in range(min(longest, width)):
        wanted = text.gather(1, (count - back).clamp(min=0))
        equal = equal & (place >= back) & (count > back)
        equal[:, back:] &= text[:, : width - back] == wanted
        matched += equal
    best = matched.amax(1, keepdim=True) if width else last.new_zeros(last.shape)
    is_found = (best >= shortest) & (drafts.may_draft[rows].unsqueeze(1) > 0) & (rows.unsqueeze(1) > 0)
    first = ((matched == best) * (place + 1)).amax(1, keepdim=True) if width else torch.zeros_like(count)
    ahead = torch.arange(drafts.width - 1, device=rows.device)
    found = text.gather(1, first + ahead % (count + 1 - first).clamp(min=1))
    real = rows.unsqueeze(1) > 0
    drafts.count[rows] = torch.where(real, is_found.int() * (drafts.width - 1), drafts.count[rows].unsqueeze(1))[:, 0]
    drafts.tokens[rows] = torch.where(is_found, found, drafts.tokens[rows])
