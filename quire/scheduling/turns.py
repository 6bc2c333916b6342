"""Turns: which rows decode in a plan where the model is dealt to stages.

A row is at one stage at a time: its next token cannot be begun before the last stage has made the one before. So rows
are dealt to as many plans as there are stages, and while one plan is at the first stage the others are further on.
Where there is nobody else to compute for, rows are planned once ahead: the first stage waits for their tokens on the
device, which is sooner than the host could tell it that they are there.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quire.scheduling.seats import DecodeRows, HostSeats
from quire.scheduling.state import PlannedStep


class Turns:
    """stages: of workers."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._turn = 0
        self._last = np.zeros(0, np.int64)  # turn of each seat

    def rows(self, seats: HostSeats, in_flight: Iterable[PlannedStep], *, alone: bool) -> DecodeRows:
        """Of those that decode a share, the ones that have waited longest; none that is in one of the latest plans, or,
        where all are and they are `alone` (no prompts wait), none that is in two of those under way."""
        every = seats.decode_rows()
        if len(self._last) != len(seats.decoding):
            self._last = np.zeros(len(seats.decoding), np.int64)
        under_way = np.zeros(len(seats.decoding), np.int64)
        free = seats.decoding.copy()
        for ago, step in enumerate(reversed([*in_flight])):
            under_way[step.plan.seats] += 1
            if ago < self._stages - 1:
                free[step.plan.seats] = False
        found = every.seats[free[every.seats]]
        if alone and not len(found):
            found = every.seats[under_way[every.seats] < 2]
        most = -(-len(every) // self._stages)
        if len(found) > most:
            found = np.sort(found[np.argsort(self._last[found], kind="stable")[:most]])
        self._turn += 1
        self._last[found] = self._turn
        return seats.rows_in(found)
