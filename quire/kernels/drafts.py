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
from quire.kernels.step.state import SeatState, StepBuffers

__all__ = ["DraftBuffers", "DraftState", "commit_drafted", "gather_drafted", "probe", "propose_ngram"]


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
    place = torch.arange(width)
    offset = torch.minimum(place, count.unsqueeze(1))
    positions = computed.unsqueeze(1) + offset
    is_there = (place <= count.unsqueeze(1)) & ~is_over.unsqueeze(1)
    ids = torch.cat([state.last_token[rows].unsqueeze(1), drafts.tokens[rows]], 1).masked_fill(~is_there, 0)
    blocks = state.block_table[rows.unsqueeze(1), positions // state.block_size].long()
    slots = (blocks * state.block_size + positions % state.block_size).masked_fill(~is_there, -1)
    first = computed + 1 - is_over.long()
    out.input_ids.copy_(ids.flatten())
    out.positions.copy_(positions.flatten())
    out.slots.copy_(slots.flatten())
    out.seq_lens.copy_(first + count)
    more.seats.copy_(seats.repeat_interleave(width))
    more.lengths.copy_((first.unsqueeze(1) + offset).flatten())
    more.first_lens.copy_(first)
    more.used.copy_(count.masked_fill(is_over, -1))
    state.token_of_slot[slots[is_there]] = ids[is_there]


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
    tokens, place = sampled.view(-1, width), torch.arange(width)
    is_right = (tokens[:, :-1] == input_ids.view(-1, width)[:, 1:]) & (place[:-1] < used)
    matched = is_right.int().cumprod(1).sum(1)
    count = (matched + 1).masked_fill(more.used < 0, 0)
    outcome[:, :width] = tokens.masked_fill(place >= count.unsqueeze(1), -1)
    outcome[:, width] = more.used.clamp(min=0)
    outcome[:, width + 1] = matched
    live = (rows > 0) & (count > 0)
    state.num_computed[rows[live]] = (more.first_lens - 1 + count)[live].int()
    state.last_token[rows[live]] = tokens.gather(1, matched.unsqueeze(1))[live, 0]


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
    rows = seats.long()
    compared = (drafts.count[rows] > 0) & (drafts.may_draft[rows] > 0) & (torch.arange(len(rows)) < num_decodes)
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
    for seat in seats.tolist():
        if seat:
            text = _text(state, seat)
            start = _follower(text, longest, shortest) if drafts.may_draft[seat] else None
            drafts.count[seat] = 0 if start is None else drafts.width - 1
            if start is not None:
                drafts.tokens[seat] = text[start + torch.arange(drafts.width - 1) % (len(text) - start)]


def _text(state: SeatState, seat: int) -> torch.Tensor:
    """All tokens of a request: those whose KV is there, and the last."""
    count = int(state.num_computed[seat])
    blocks = state.block_table[seat, : -(-count // state.block_size)].long()
    slots = (blocks.unsqueeze(1) * state.block_size + torch.arange(state.block_size)).flatten()[:count]
    return torch.cat([state.token_of_slot[slots], state.last_token[seat : seat + 1]])


def _follower(text: torch.Tensor, longest: int, shortest: int) -> int | None:
    """Where that begins which followed before."""
    last = len(text) - 1
    lengths = torch.zeros(last, dtype=torch.long)  # of the match that ends at each place
    equal = torch.ones(last, dtype=torch.bool)
    for back in range(min(longest, last)):
        equal[:back] = False
        equal[back:] &= text[: last - back] == text[last - back]
        lengths += equal
    best = int(lengths.max()) if last else 0
    return int((lengths == best).nonzero()[-1]) + 1 if best >= shortest else None
