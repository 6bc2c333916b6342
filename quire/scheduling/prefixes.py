"""SharedPrefixFinder: which decode rows read the same KV blocks first, told to the worker when it changes.

Attention can read a prefix that several rows share once for all of them. That takes another kernel in every layer, so
it must save some reads; and every new grouping must be sent, so it stays as it is while it serves: rows that leave are
merely left out, and only a row that comes and shares blocks, or too many leaving, makes groups anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.kv.manager import KVManager
from quire.kv.prefix_tree import PrefixGroup, PrefixTree
from quire.scheduling.seats import DecodeRows
from quire.types.plan import SharedPrefixes


@dataclass(frozen=True, slots=True)
class Worth:
    """What it takes to read prefixes once; in tokens of one layer's KV. A group of m rows saves (m - 1) * shared."""

    shared: int = 256  # by each group
    saved: int = 1024  # by each group
    saved_in_all: int = 8192  # by all groups, to begin with; they are given up below half of it


WORTH = Worth()


class SharedPrefixFinder:
    """max_seats: seats are 1 … max_seats."""

    def __init__(self, kv: KVManager, max_seats: int, worth: Worth) -> None:
        self._kv = kv
        self._worth = worth
        # Tables of several kinds of layers share different prefixes; rows without a prefix cache share none.
        self._possible = kv.enable_prefix_caching and len(kv.groups) == 1
        self._tree = PrefixTree()
        self._in_tree = np.zeros(max_seats + 1, np.bool_)
        self._rows: DecodeRows | None = None  # those of the step before
        self._told: list[PrefixGroup] = []  # as announced, less those who left
        self._group_of: dict[int, PrefixGroup] = {}  # of these, by seat

    def update(self, rows: DecodeRows) -> SharedPrefixes | None:
        """The groups among the decode rows of the next plan; None if they are as told before (less who is gone).

        To be asked for every plan, once it has its rows and their blocks: a seat that changes hands catches up in
        one plan at least, and so is seen to have left.
        """
        if rows is self._rows or not self._possible:
            return None
        self._rows = rows
        here = np.zeros_like(self._in_tree)
        here[rows.seats] = True
        left = np.flatnonzero(self._in_tree & ~here).tolist()
        come = np.flatnonzero(~self._in_tree.take(rows.seats)).tolist()
        self._in_tree = here
        self._leave(left)
        shares = False
        for row in come:
            shares |= self._tree.insert(int(rows.seats[row]), self._kv.table(rows.requests[row])[0])
        if not shares and self._still_serve():
            return None
        return self._tell(self._best())

    def _leave(self, seats: list[int]) -> None:
        shrunk: list[PrefixGroup] = []
        for seat in seats:
            self._tree.remove(seat)
            if (group := self._group_of.pop(seat, None)) is not None and group not in shrunk:
                shrunk.append(group)
        for group in shrunk:
            group.seats[:] = [seat for seat in group.seats if seat in self._group_of]

    def _still_serve(self) -> bool:
        told = self._told
        return not told or (min(len(group.seats) for group in told) > 1 and self._serve(told, begun=True))

    def _serve(self, groups: list[PrefixGroup], begun: bool) -> bool:
        saved = sum(group.saved for group in groups) * self._kv.block_size
        return saved * (2 if begun else 1) >= self._worth.saved_in_all

    def _best(self) -> list[PrefixGroup]:
        size, worth = self._kv.block_size, self._worth
        groups = self._tree.groups(max(1, -(-worth.shared // size)))
        groups = [group for group in groups if group.saved * size >= worth.saved]
        return groups if self._serve(groups, begun=bool(self._told)) else []

    def _tell(self, groups: list[PrefixGroup]) -> SharedPrefixes | None:
        if _content(groups) == _content(self._told):
            return None
        self._told = groups
        self._group_of = {seat: group for group in groups for seat in group.seats}
        return SharedPrefixes(
            seats=np.array([seat for group in groups for seat in group.seats], np.int32),
            starts=np.cumsum([0, *(len(group.seats) for group in groups)], dtype=np.int32),
            num_tokens=np.array([group.num_blocks * self._kv.block_size for group in groups], np.int32),
        )


def _content(groups: list[PrefixGroup]) -> set[tuple[int, frozenset[int]]]:
    return {(group.num_blocks, frozenset(group.seats)) for group in groups}
