"""Turns: which rows decode in a plan where the model is dealt to stages.

A row is at one stage at a time: its next token cannot be begun before the last stage has made the one before. So rows
are dealt to as many plans as there are stages, and while one plan is at the first stage the others are further on.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np

from quire.scheduling.seats import DecodeRows, HostSeats
from quire.scheduling.state import PlannedStep


class Turns:
    """stages: of workers."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._turn = 0
        self._last = np.zeros(0, np.int64)  # turn of each seat

    def rows(self, seats: HostSeats, in_flight: Iterable[PlannedStep]) -> DecodeRows:
        """Of those that decode a share, the ones that have waited longest; none that is in one of the latest plans."""
        every = seats.decode_rows()
        if len(self._last) != len(seats.decoding):
            self._last = np.zeros(len(seats.decoding), np.int64)
        free = seats.decoding.copy()
        for step in islice(reversed([*in_flight]), self._stages - 1):
            free[step.plan.seats] = False
        found = every.seats[free[every.seats]]
        most = -(-len(every) // self._stages)
        if len(found) > most:
            found = np.sort(found[np.argsort(self._last[found], kind="stable")[:most]])
        self._turn += 1
        self._last[found] = self._turn
        return seats.rows_in(found)
