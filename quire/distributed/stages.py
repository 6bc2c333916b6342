"""What the stages of a model hand on to each other.

A stage gets the residual stream of a step's tokens from the one before it and sends it to the next. Tokens that the
last stage samples go back to the first, which alone reads them, and not before a row of a plan needs them: until then
it computes other rows. Nor are they asked for sooner: on a GPU what waits for a message is a kernel, and the products
of other rows would have a processor less for as long as it does.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from quire.platforms.transfers import upload
from quire.types.ranks import Rank

_STATES, _TOKENS = 0, 1  # kinds of messages
_TAGS = 1 << 20  # steps after which the numbers of messages begin anew
_MOST_UNASKED = 6  # steps' tokens: the library keeps eight messages for who has not asked, then their sender waits


class _Sampled(NamedTuple):
    """Tokens that the first stage has not asked for yet."""

    step: int
    seats: np.ndarray  # plan order, of rows that sample
    rows: np.ndarray  # int64, the same rows' places in the plan
    num_rows: int  # of the plan


class Pipeline:
    """This worker's place in the line. Everything is called in the order of plans, on the compute stream.

    inbox: the residual stream that came last, [max_tokens, hidden]; graphs read it. outbox: what is to be sent.
    """

    def __init__(self, rank: Rank, device: torch.device, links: tuple[dist.ProcessGroup, dist.ProcessGroup]) -> None:
        """links: one for each kind of message, over all ranks: none waits for a message of the other kind."""
        self.is_first, self.is_last = rank.stage == 0, rank.stage == rank.stages - 1
        self._rank, self._device, self._links = rank, device, links
        self._unsent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._sampled: deque[_Sampled] = deque()
        self._step_of_seat: dict[int, int] = {}  # that sampled for it last, as long as the token is not here
        self._number = 0  # of the step at hand
        self.inbox = self.outbox = torch.empty(0)
        self._meet()

    def reserve(self, max_tokens: int, hidden: int, dtype: torch.dtype) -> None:
        """Make room for steps of so many tokens."""
        if len(self.inbox) >= max_tokens:
            return
        nothing = torch.zeros(0, hidden, dtype=dtype, device=self._device)
        self.inbox = nothing if self.is_first else nothing.new_zeros(max_tokens, hidden)
        self.outbox = nothing if self.is_last else nothing.new_zeros(max_tokens, hidden)

    # -- states, onwards ----------------------------------------------------------------------------------------

    def receive(self, tokens: int) -> None:
        """Fill the inbox with what the stage before made of the step's tokens."""
        if not self.is_first:
            self._receive(self.inbox[:tokens], self._rank.index - self._rank.width, _STATES, self._number)

    def send(self, tokens: int) -> None:
        """Hand on what the outbox holds."""
        if not self.is_last:
            self._send(self.outbox[:tokens].clone(), self._rank.index + self._rank.width, _STATES, self._number)

    # -- tokens, back -------------------------------------------------------------------------------------------

    def begin(self, step: int, decoding: np.ndarray, last_token: torch.Tensor) -> None:
        """A step begins whose decode rows have these seats: their tokens must be here."""
        self._number = step
        while self._unsent and self._unsent[0][0].is_completed():
            self._unsent.popleft()
        if not self.is_first:
            return
        needed = max((self._step_of_seat.get(seat, -1) for seat in decoding.tolist()), default=-1)
        while self._sampled and (self._sampled[0].step <= needed or len(self._sampled) > _MOST_UNASKED):
            self._take(last_token)

    def sample(self, step: int, seats: np.ndarray, samples: np.ndarray, tokens: torch.Tensor) -> None:
        """The end of a step. tokens: int32 [rows] of the last stage, -1 for a row that did not sample."""
        if self.is_first == self.is_last or not samples.any():
            return
        if self.is_last:
            self._send(tokens.clone(), self._rank.index - self._span, _TOKENS, step)
        elif self.is_first:
            own = np.flatnonzero(samples)
            self._sampled.append(_Sampled(step, seats[own], own, len(seats)))
            self._step_of_seat.update(dict.fromkeys(seats[own].tolist(), step))

    def _take(self, last_token: torch.Tensor) -> None:
        """The oldest tokens that are not here become their seats' last ones. What comes for a seat that somebody else
        has by now is written over by his own token before it is read."""
        step, seats, rows, _ = sampled = self._sampled.popleft()
        own = self._fetch(sampled)[upload(torch.from_numpy(rows), self._device)]
        last_token[upload(torch.from_numpy(seats.astype(np.int64)), self._device)] = own
        for seat in seats.tolist():
            if self._step_of_seat.get(seat) == step:
                del self._step_of_seat[seat]

    def _fetch(self, sampled: _Sampled) -> torch.Tensor:
        """int32 [rows of the plan], once they are here."""
        tokens = torch.empty(sampled.num_rows, dtype=torch.int32, device=self._device)
        self._receive(tokens, self._rank.index + self._span, _TOKENS, sampled.step)
        return tokens

    def drain(self) -> None:
        """Wait for all that is on its way: what comes next begins anew."""
        while self._sampled:
            self._fetch(self._sampled.popleft())
        self._step_of_seat.clear()

    # -- both ---------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """The library joins two ranks when one of them has something for the other, for which it waits: not amid the
        first step, after whose tokens the first stage may never ask."""
        nothing = torch.zeros(1, dtype=torch.int32, device=self._device)
        if self.is_first and not self.is_last:
            self._receive(nothing, self._rank.index + self._span, _TOKENS, self._number)
        elif self.is_last and not self.is_first:
            self._send(nothing, self._rank.index - self._span, _TOKENS, self._number)

    @property
    def _span(self) -> int:
        """From a rank of the first stage to its like of the last one."""
        return self._rank.size - self._rank.width

    def _send(self, message: torch.Tensor, to: int, kind: int, step: int) -> None:
        work = dist.isend(message, to, group=self._links[kind], tag=self._tag(kind, step))
        assert work is not None
        self._unsent.append((work, message))

    def _receive(self, into: torch.Tensor, of: int, kind: int, step: int) -> None:
        """On a GPU it is the stream that waits."""
        work = dist.irecv(into, of, group=self._links[kind], tag=self._tag(kind, step))
        assert work is not None
        work.wait()

    def _tag(self, kind: int, step: int) -> int:
        """Steps' messages are told apart where the library can."""
        return 0 if self._device.type == "cuda" else 2 * (step % _TAGS) + kind
