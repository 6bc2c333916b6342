"""What scans of every kind share: tokens laid out piece by piece, and states handed from piece to piece."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.recurrent.rows import CHUNK, Chunks, Rows


class Pieces:
    """The tokens of a step's chunks as [pieces, CHUNK]; places that hold none read as zero."""

    def __init__(self, chunks: Chunks, num_tokens: int) -> None:
        place = torch.arange(CHUNK, device=chunks.start.device)
        self.is_real = place < chunks.length[:, None]  # [pieces, CHUNK]
        self._token = (chunks.start[:, None] + place).masked_fill(~self.is_real, num_tokens)
        self._num_tokens = num_tokens

    def lay(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, …] → [pieces, CHUNK, …]."""
        token = self._token.clamp(max=max(self._num_tokens - 1, 0))
        mask = self.is_real.view(*self.is_real.shape, *(1 for _ in x.shape[1:]))
        return x[token].where(mask, 0)

    def back(self, y: torch.Tensor, out: torch.Tensor) -> None:
        """y [pieces, CHUNK, …] → out [tokens + 1, …], whose last line is for what is nobody's."""
        out[self._token] = y.to(out.dtype)


def read_states(state: torch.Tensor, rows: Rows, entry: int) -> torch.Tensor:
    """What each row's state is before the step: [rows, …] in float32, zero where it begins."""
    found = state[rows.pages[:, entry].long()].float()
    return found.masked_fill_(~_like(rows.goes_on, found), 0)


def write_states(state: torch.Tensor, new: torch.Tensor, rows: Rows, entry: int) -> None:
    """Of live rows; the others, which all have the null block, write again what is there."""
    pages = rows.pages[:, entry].long()
    state[pages] = torch.where(_like(rows.is_live, new), new.to(state.dtype), state[pages])


def hand_on(
    states: torch.Tensor, chunks: Chunks, step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Through the pieces of all rows, the first ones first. Returns what the state is before each piece.

    Args:
        states: of the rows, updated in place.
        step: (states, number of each row's piece) → states after it. A row that has no more pieces gets any, and what
            comes of it is dropped.

    Shapes:
        states: [rows, …]. Returns [pieces, …].
    """
    first, last, count = chunks.first[:-1], chunks.first[1:], len(chunks.row)
    before = states.new_zeros(count + 1, *states.shape[1:])  # the last line is for rows that have no more pieces
    for number in range(chunks.most):
        piece = first + number
        is_there = piece < last
        before[piece.masked_fill(~is_there, count)] = states
        states.copy_(torch.where(_like(is_there, states), step(states, piece.clamp(max=count - 1)), states))
    return before[:-1]


def _like(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return mask.view(-1, *(1 for _ in x.shape[1:]))
