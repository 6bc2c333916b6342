"""Rows that take turns where the model is dealt to stages: each plan has a share, and none is in two at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.scheduling.turns import Turns


class Seats:
    """So many decoding rows, as HostSeats has them."""

    def __init__(self, rows: int) -> None:
        self.decoding = np.zeros(rows + 1, np.bool_)
        self.decoding[1:] = True

    def decode_rows(self) -> Any:
        return self.rows_in(np.flatnonzero(self.decoding).astype(np.int32))

    def rows_in(self, seats: np.ndarray) -> Any:
        return type("Rows", (SimpleNamespace,), {"__len__": lambda self: len(self.seats)})(seats=seats)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_rows_are_dealt_to_the_plans_under_way(rows: int, stages: int) -> None:
    seats: Any = Seats(rows)
    turns, flight = Turns(stages), list[Any]()
    counts = np.zeros(rows + 1, int)
    for _ in range(12 * stages):
        found = turns.rows(seats, flight[-stages:], alone=False).seats
        assert len(found) <= -(-rows // stages)
        busy = {seat for step in flight[len(flight) - stages + 1 :] for seat in step.plan.seats.tolist()}
        assert not busy & set(found.tolist())
        counts[found] += 1
        flight.append(SimpleNamespace(plan=SimpleNamespace(seats=found)))
    assert counts[1:].max() - counts[1:].min() <= 2
    assert counts[1:].min() >= 10  # each goes round in nearly every turn
    seats.decoding[:] = False
    assert not len(turns.rows(seats, [], alone=False))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_lone_row_is_planned_once_ahead(stages: int) -> None:
    seats: Any = Seats(1)
    turns, flight = Turns(stages), list[Any]()
    for expected in (1, 1, 0):  # the last is in two plans under way
        found = turns.rows(seats, flight, alone=True).seats
        assert len(found) == expected
        flight += [SimpleNamespace(plan=SimpleNamespace(seats=found))] * expected
    assert len(turns.rows(seats, flight[1:], alone=True).seats) == 1  # the oldest is settled
    assert not len(turns.rows(seats, flight[1:], alone=False).seats)  # a prompt waits: it goes first
