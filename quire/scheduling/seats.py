"""The seats as the brain counts them: the same rows that the worker keeps on the device, as numpy columns.

A decoding request costs no Python work of its own in `plan`: its counters advance with those of all the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.scheduling.request import Request
from quire.types.kv import PAD_SEAT

Ints = np.ndarray  # int32
_MOST_SHARES = 64


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode rows of a plan, column by column, in plan order. Shared by all plans with the same rows."""

    seats: Ints  # [rows]
    requests: list[Request]
    ids: list[str]
    appends: list[Callable[[int], None]]  # of the requests' tokens
    streamed: list[int] | None  # rows whose every token is reported at once; None: all
    streamed_ids: list[str]
    followed: list[int]  # rows each of whose tokens is looked at

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def has_readers(self) -> bool:
        return bool(self.streamed_ids)


class HostSeats:
    """Columns over seats 0 … max_seats; seat 0 is padding and stays empty. Counts are tokens.

    Where nothing is drafted `num_computed` is exact. A decode row with drafts advances by as many tokens as turn out
    right, which only the device knows before the step is settled: then it is what the steps in flight make at most.
    """

    def __init__(self, max_seats: int, num_groups: int) -> None:
        size = max_seats + 1
        self.num_computed = np.zeros(size, np.int32)  # KV is there or planned
        # Of seats that decode, where there are drafts: the same at least, and at most if there were no limit.
        self.least = np.zeros(size, np.int32)
        self.most = np.zeros(size, np.int32)
        self.may_draft = np.zeros(size, np.bool_)
        self.num_seen = np.zeros(size, np.int32)  # tokens whose ids are known
        self.limit = np.zeros(size, np.int32)
        self.due = np.zeros(size, np.int32)  # when there is more to tell than a token, see Request
        self.room = np.zeros((num_groups, size), np.int32)  # that its blocks of each group can hold
        self.decoding = np.zeros(size, np.bool_)  # it takes part in the next step with the token sampled last
        self.final_only = np.zeros(size, np.bool_)
        self.followed = np.zeros(size, np.bool_)
        self.requests = np.full(size, None, object)
        self._ids = np.full(size, None, object)
        self._appends = np.full(size, None, object)
        self.stops: Counter[int] = Counter()  # tokens that end a seated request, and how many
        self._is_stop = np.zeros(1, np.bool_)  # the same by token; beyond its end, and at it, there is none
        self._free = list(range(max_seats, PAD_SEAT, -1))
        self._max_seats = max_seats
        self._rows: DecodeRows | None = None
        self._shares: dict[bytes, DecodeRows] = {}  # of these some, by their seats

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self._max_seats - len(self._free)

    def take(self, request: Request, num_computed: int, room: list[int]) -> None:
        """Give `request` a free seat. It catches up first."""
        seat = request.seat = self._free.pop()
        self.num_computed[seat] = num_computed
        self.room[:, seat] = room
        self.num_seen[seat] = len(request.tokens)
        self.limit[seat] = request.limit
        self.due[seat] = request.due
        self.final_only[seat] = request.final_only
        self.followed[seat] = request.is_followed
        self.may_draft[seat] = request.may_draft
        self.requests[seat] = request
        self._ids[seat] = request.id
        self._appends[seat] = request.tokens.append
        for token in request.stops:
            self._add_stop(token)

    def give_back(self, request: Request) -> int:
        """Empty the seat of `request`; returns its number."""
        seat, request.seat = request.seat, PAD_SEAT
        if self.decoding[seat]:
            self.stop_decoding(seat)
        for column in (self.requests, self._ids, self._appends):
            column[seat] = None
        for token in request.stops:
            self.stops[token] -= 1
            if not self.stops[token]:
                del self.stops[token]
                self._is_stop[token] = False
        self._free.append(seat)
        return seat

    def _add_stop(self, token: int) -> None:
        self.stops[token] += 1
        if token + 1 >= len(self._is_stop):
            self._is_stop = np.concatenate([self._is_stop, np.zeros(token + 2, np.bool_)])
        self._is_stop[token] = True

    def rows_that_stop(self, tokens: Ints) -> list[int]:
        """Those whose token ends some seated request, not necessarily their own."""
        return np.flatnonzero(self._is_stop.take(tokens, mode="clip")).tolist()

    def end_catching_up(self, seat: int) -> None:
        """All its known tokens are planned."""
        self.least[seat] = self.most[seat] = self.num_computed[seat]

    def start_decoding(self, seat: int) -> None:
        self.decoding[seat] = True
        self._rows = None

    def stop_decoding(self, seats: int | Ints) -> None:
        self.decoding[seats] = False
        self._rows = None

    def decode_rows(self) -> DecodeRows:
        """All that decode. As long as these stay the same requests the very same object comes back."""
        if self._rows is None:
            self._rows = self._made(np.flatnonzero(self.decoding).astype(np.int32))
            self._shares.clear()
        return self._rows

    def rows_in(self, seats: Ints) -> DecodeRows:
        """Of those that decode the rows in `seats`, rising; the same object for the same ones as well."""
        every = self.decode_rows()
        if len(seats) == len(every):
            return every
        key = seats.tobytes()
        if key not in self._shares:
            if len(self._shares) >= _MOST_SHARES:
                self._shares.clear()
            self._shares[key] = self._made(seats)
        return self._shares[key]

    def _made(self, seats: Ints) -> DecodeRows:
        final_only = self.final_only.take(seats)
        streamed = np.flatnonzero(~final_only).tolist() if final_only.any() else None
        ids = self._ids.take(seats).tolist()
        return DecodeRows(
            seats,
            self.requests.take(seats).tolist(),
            ids,
            self._appends.take(seats).tolist(),
            streamed,
            ids if streamed is None else [ids[row] for row in streamed],
            np.flatnonzero(self.followed.take(seats)).tolist(),
        )

    def check(self) -> None:
        """Raise AssertionError if a seat is free and taken, or neither."""
        taken = [seat for seat, request in enumerate(self.requests) if request is not None]
        assert sorted(taken + self._free) == list(range(1, self._max_seats + 1)), "a seat is lost or listed twice"
        assert not self.decoding[self._free].any(), "a free seat decodes"
        stops = Counter(token for request in self.requests[taken] for token in request.stops)
        assert dict(self.stops) == dict(stops), "stop tokens of the seated are miscounted"
        assert np.flatnonzero(self._is_stop).tolist() == sorted(stops), "the table of stop tokens is another one"
        assert not self._is_stop[-1], "tokens beyond the table of stop tokens stop"
