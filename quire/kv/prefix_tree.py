"""PrefixTree: which block tables begin with the same blocks, kept up to date as requests come and go.

A radix tree over block tables: each fork is a place where tables part, and its depth is how many blocks all tables
below it have in common. A table enters and leaves in as many dictionary look-ups as there are forks on its way; what it
has in common with another one is compared run by run, not block by block.

Which tables to put together is a question of reads saved: a group of m tables whose first d blocks are the same reads
these once instead of m times, and so saves (m - 1) * d block reads a step. Each table is in one group at most.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.kv.block_pool import Block


class PrefixGroup(NamedTuple):
    """Seats whose tables agree in the first `num_blocks` blocks."""

    num_blocks: int
    seats: list[int]

    @property
    def saved(self) -> int:
        """Blocks that need not be read again."""
        return (len(self.seats) - 1) * self.num_blocks


Found = tuple[list[int], list[PrefixGroup]]  # seats that are alone, and groups of the others; not to be changed


class _Fork:
    __slots__ = ("depth", "edge", "forks", "found", "leaves")

    def __init__(self, depth: int, edge: list[Block]) -> None:
        self.depth = depth  # blocks that all tables below have in common
        self.edge = edge  # those of them that come after the fork above
        self.forks: dict[Block, _Fork] = {}  # by the block at `depth`
        self.leaves: dict[Block, int] = {}  # seats whose tables are alone from here on, likewise
        self.found: Found | None = None  # for all tables below; None: to be found again


class PrefixTree:
    """min_blocks: a group shares at least so many, 1 or more.

    Tables are watched, not copied. While a table is in the tree it may grow, and no block that it had when it came may
    change; it ends in a block that is in no other table.
    """

    def __init__(self, min_blocks: int) -> None:
        self._min_blocks = min_blocks
        self._root = _Fork(0, [])
        self._tables: dict[int, list[Block]] = {}  # by seat

    def insert(self, seat: int, table: list[Block]) -> bool:
        """Add the table of `seat`. Returns whether its first block is that of another one."""
        self._tables[seat] = table
        fork = self._root
        fork.found = None
        while (child := fork.forks.get(first := table[fork.depth])) is not None:
            depth = _end_of_common(child.edge, table, fork.depth)
            if depth < child.depth:
                child = fork.forks[first] = _cut(child, depth)
            fork = child
            fork.found = None
        other = fork.leaves.pop(first, None)
        if other is None:
            fork.leaves[first] = seat
            return fork is not self._root
        theirs = self._tables[other]
        depth = _end_of_common(theirs[fork.depth :], table, fork.depth)
        fork.forks[first] = parting = _Fork(depth, table[fork.depth : depth])
        parting.leaves = {theirs[depth]: other, table[depth]: seat}
        return True

    def remove(self, seat: int) -> None:
        """Take out the table of `seat`. Nothing but its list is looked at: its blocks may be others' by now."""
        table = self._tables.pop(seat)
        above = fork = self._root
        fork.found = None
        while fork.leaves.get(table[fork.depth]) != seat:
            above, fork = fork, fork.forks[table[fork.depth]]
            fork.found = None
        del fork.leaves[table[fork.depth]]
        if fork is self._root or len(fork.forks) + len(fork.leaves) > 1:
            return
        first = fork.edge[0]
        if fork.forks:
            (child,) = fork.forks.values()
            child.edge = fork.edge + child.edge
            above.forks[first] = child
        else:
            del above.forks[first]
            (above.leaves[first],) = fork.leaves.values()

    def groups(self) -> list[PrefixGroup]:
        """Groups that save many reads, the most saving one first.

        From the deepest fork up: a group of all tables below a fork that are still alone takes in each group below
        that saves less by itself than its members do here, and is made if that saves something in all. Forks below
        which nothing has changed know their answer.
        """
        unknown = [self._root]
        for fork in unknown:  # it grows meanwhile
            unknown.extend(child for child in fork.forks.values() if child.found is None)
        for fork in reversed(unknown):
            fork.found = self._find(fork)
        assert self._root.found is not None
        return sorted(self._root.found[1], key=lambda group: -group.saved)

    def _find(self, fork: _Fork) -> Found:
        alone, groups = list(fork.leaves.values()), []
        for child in fork.forks.values():
            assert child.found is not None
            alone += child.found[0]
            groups += child.found[1]
        depth = fork.depth
        if depth < self._min_blocks:
            return alone, groups
        members, others, lost = alone.copy(), [], 0
        for group in groups:
            count = len(group.seats)
            if count * depth > (count - 1) * group.num_blocks:
                members += group.seats
                lost += (count - 1) * group.num_blocks
            else:
                others.append(group)
        if (len(members) - 1) * depth <= lost:
            return alone, groups
        return [], [*others, PrefixGroup(depth, members)]


def _cut(fork: _Fork, depth: int) -> _Fork:
    """A new fork at `depth`, within the edge of `fork`, which becomes its only child."""
    above = fork.depth - len(fork.edge)
    upper = _Fork(depth, fork.edge[: depth - above])
    fork.edge = fork.edge[depth - above :]
    upper.forks[fork.edge[0]] = fork
    return upper


def _end_of_common(run: list[Block], table: list[Block], start: int) -> int:
    """The first index from `start` on at which `table` differs from `run`, which begins there (or the shorter's end).

    Slices are compared by identity in C; halving the one that differs costs no more than one look at each block.
    """
    low, high = 0, min(len(run), len(table) - start)
    if run[:high] == table[start : start + high]:
        return start + high
    while high - low > 1:  # run[:low] agrees, run[low:high] does not
        middle = (low + high) // 2
        if run[low:middle] == table[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return start + low
