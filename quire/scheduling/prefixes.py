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
class SharingThresholds:
    """What it takes to read prefixes once; in tokens of one layer's KV. A group of m rows saves (m - 1) * shared.

    On an H200 a token saved is about half a nanosecond a layer (rows find the prefix in the L2 cache), the second
    kernel and the merge cost two to three microseconds.
    """

    shared: int = 256  # by each group
    saved: int = 1024  # by each group
    saved_in_all: int = 8192  # by all groups, to begin with; they are given up below half of it


SHARING_THRESHOLDS = SharingThresholds()
_NONE = -1
_NO_GROUPS = np.zeros(0, np.int32)


class SharedPrefixFinder:
    """max_seats: seats are 1 … max_seats."""

    def __init__(self, kv: KVManager, max_seats: int, thresholds: SharingThresholds) -> None:
        self._kv = kv
        self._thresholds = thresholds
        # Layers that see everything read a prefix once; a window may begin within it. Without a prefix cache rows share
        # nothing.
        self._group = kv.shareable if kv.enable_prefix_caching else None
        self._block_size = kv.block_sizes[self._group or 0]
        self._tree = PrefixTree(max(1, -(-thresholds.shared // self._block_size)))
        self._in_tree = np.zeros(max_seats + 1, np.bool_)
        self._rows: DecodeRows | None = None  # those of the step before
        # The groups as they were told, less the seats that left.
        self._group_of = np.full(max_seats + 1, _NONE, np.int32)  # by seat
        self._num_blocks = self._num_seats = _NO_GROUPS

    def update(self, rows: DecodeRows) -> SharedPrefixes | None:
        """The groups among the decode rows of the next plan; None if they are as told before (less who is gone).

        To be asked for every plan, once it has its rows and their blocks: a seat that changes hands catches up in
        one plan at least, and so is seen to have left.
        """
        if rows is self._rows or self._group is None:
            return None
        self._rows = rows
        here = np.zeros_like(self._in_tree)
        here[rows.seats] = True
        left = np.flatnonzero(self._in_tree & ~here)
        come = np.flatnonzero(~self._in_tree.take(rows.seats)).tolist()
        self._in_tree = here
        if len(left):
            self._leave(left)
        shares = False
        for row in come:
            shares |= self._tree.insert(int(rows.seats[row]), self._kv.table(rows.requests[row])[self._group])
        if not shares and self._still_serve():
            return None
        return self._tell(self._best())

    def _leave(self, seats: np.ndarray) -> None:
        for seat in seats.tolist():
            self._tree.remove(seat)
        groups = self._group_of.take(seats)
        self._num_seats = self._num_seats - np.bincount(groups[groups != _NONE], minlength=len(self._num_seats))
        self._group_of[seats] = _NONE

    def _still_serve(self) -> bool:
        """Whether the groups told may stay: each has two members, and together they save half of what began them."""
        if not len(self._num_seats):
            return True
        saved = int(((self._num_seats - 1) * self._num_blocks).sum())
        return int(self._num_seats.min()) > 1 and self._serve(saved)

    def _serve(self, saved: int) -> bool:
        """saved: blocks that groups save in all."""
        begun = len(self._num_seats) > 0
        return saved * self._block_size * (2 if begun else 1) >= self._thresholds.saved_in_all

    def _best(self) -> list[PrefixGroup]:
        size, thresholds = self._block_size, self._thresholds
        groups = [group for group in self._tree.groups() if group.saved * size >= thresholds.saved]
        return groups if self._serve(sum(group.saved for group in groups)) else []

    def _tell(self, groups: list[PrefixGroup]) -> SharedPrefixes | None:
        if self._is_told(groups):
            return None
        self._num_blocks = np.array([group.num_blocks for group in groups], np.int32)
        self._num_seats = np.array([len(group.seats) for group in groups], np.int32)
        seats = np.array([seat for group in groups for seat in group.seats], np.int32)
        self._group_of[:] = _NONE
        self._group_of[seats] = np.repeat(np.arange(len(groups), dtype=np.int32), self._num_seats)
        starts = np.zeros(len(groups) + 1, np.int32)
        np.cumsum(self._num_seats, out=starts[1:])
        return SharedPrefixes(seats, starts, self._num_blocks * np.int32(self._block_size))

    def _is_told(self, groups: list[PrefixGroup]) -> bool:
        """Whether these are the groups told before, in any order."""
        told = sorted(zip(self._num_blocks.tolist(), self._num_seats.tolist(), strict=True))
        if told != sorted((group.num_blocks, len(group.seats)) for group in groups):
            return False
        # As many groups of the same kinds: they are the same if the seats of each are in one group of its kind.
        for group in groups:
            before = self._group_of.take(group.seats)
            if before[0] == _NONE or (before != before[0]).any() or self._num_blocks[before[0]] != group.num_blocks:
                return False
            if self._num_seats[before[0]] != len(group.seats):
                return False
        return True
