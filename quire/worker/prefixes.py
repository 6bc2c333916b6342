"""PrefixRows: which rows of a step share a prefix, cut into the tiles that a prefix kernel works on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.attention.base import prefix_tile_rows, prefix_tiles
from quire.types.plan import StepPlan

_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLayout:
    """`SharedPrefix` on the host, int32, without padding."""

    tokens_of_row: np.ndarray  # [rows]
    members: np.ndarray  # [rows in a group]
    tiles: np.ndarray  # [tiles, 4]


class PrefixRows:
    """Remembers the groups of seats that plans tell. group: query heads a KV head."""

    def __init__(self, max_seats: int, group: int) -> None:
        self.group = group
        self._group_of_seat = np.full(max_seats + 1, _NONE, dtype=np.int32)
        self._num_tokens = np.zeros(0, dtype=np.int32)  # of each group
        self._seats = np.zeros(0, dtype=np.int32)  # what `_layout` was made for
        self._layout: PrefixLayout | None = None

    def take(self, plan: StepPlan) -> None:
        """What the plan says of groups. To be called for every plan, before `layout`."""
        groups = self._group_of_seat
        if plan.releases:
            groups[plan.releases] = _NONE
        if plan.prefixes is not None:
            told = plan.prefixes
            groups[:] = _NONE
            groups[told.seats] = np.repeat(np.arange(len(told.num_tokens), dtype=np.int32), np.diff(told.starts))
            self._num_tokens = told.num_tokens
            self._seats, self._layout = told.seats[:0], None

    def layout(self, seats: np.ndarray) -> PrefixLayout | None:
        """Of a step whose decode rows have these seats; None if no two of them share a prefix.

        As long as groups and seats stay what they are, the very same object comes back.
        """
        if not len(self._num_tokens):
            return None
        if not np.array_equal(seats, self._seats):
            self._seats, self._layout = seats, self._lay_out(seats)
        return self._layout

    def _lay_out(self, seats: np.ndarray) -> PrefixLayout | None:
        group_of_row = self._group_of_seat.take(seats)
        rows = np.flatnonzero(group_of_row != _NONE)
        counts = np.bincount(group_of_row.take(rows), minlength=len(self._num_tokens))
        # A group's rows are spread over its tiles evenly. Groups that find no room in the tiles are left out.
        cuts = np.where(counts > 1, -(-counts // prefix_tile_rows(self.group)), 0)
        cuts[np.cumsum(cuts) > prefix_tiles(len(seats), self.group)] = 0
        tiles = int(cuts.sum())
        if tiles == 0:
            return None
        rows = rows[cuts.take(group_of_row.take(rows)) > 0]
        members = rows[np.argsort(group_of_row.take(rows), kind="stable")]
        counts[cuts == 0] = 0
        group = np.repeat(np.arange(len(cuts)), cuts)
        place = np.arange(tiles) - np.repeat(np.cumsum(cuts) - cuts, cuts)  # of a tile in its group
        before = np.cumsum(counts) - counts
        begins = before[group] + counts[group] * place // cuts[group]
        ends = before[group] + counts[group] * (place + 1) // cuts[group]
        tokens_of_row = np.zeros(len(seats), dtype=np.int32)
        tokens_of_row[members] = self._num_tokens[group_of_row.take(members)]
        columns = (seats[members[begins]], begins, ends - begins, self._num_tokens[group])
        return PrefixLayout(tokens_of_row, members.astype(np.int32), np.stack(columns, axis=1).astype(np.int32))
