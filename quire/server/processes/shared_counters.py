"""Numbers of each process of one server that all its processes can read: what /metrics and /load add up.

A process writes its own page and reads all pages. A page is a file that is mapped, so what a process has counted
outlives it, and the one that is started in its place goes on counting there. Each number is written by one thread.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

SIZE = 1 << 16  # numbers of a page, of which what nobody writes takes no memory
# CONNECTIONS: infinite while the process takes none; BEATS: signs of its life; HANGS: 1 while it finds the engine hung.
# LOST: answers that died with a process. UNSEEN: requests on their way to the engine, of which it has not told yet.
PID, CONNECTIONS, ANSWERS, BEATS, HANGS, LOST, UNSEEN = range(7)
_FIRST_FREE = 8


class SharedCounters:
    """The pages of `count` processes as seen by number `mine`; by default that of a process which is alone."""

    def __init__(self, folder: Path | None = None, count: int = 1, mine: int = 0) -> None:
        self.number = mine
        self.pages = [_page(None if folder is None else folder / f"page-{i}") for i in range(count)]
        self.mine = self.pages[mine]
        self._num_taken = _FIRST_FREE

    def take(self, count: int) -> int:
        """The first of `count` slots that are nobody else's. All processes must take the same in the same order."""
        first = self._num_taken
        self._num_taken += count
        assert self._num_taken <= SIZE, "SIZE is too small"
        return first

    def sum(self, slot: int) -> float:
        return sum(page[slot] for page in self.pages)

    def vacate(self, number: int) -> None:
        """The process is gone, or there is none yet: what it counted stays, what it was doing does not."""
        self.pages[number][LOST] += self.pages[number][ANSWERS]
        for slot in (PID, ANSWERS, BEATS, HANGS, UNSEEN):
            self.pages[number][slot] = 0
        self.pages[number][CONNECTIONS] = math.inf


def _page(path: Path | None) -> memoryview[float]:
    num_bytes = 8 * SIZE
    if path is None:
        return memoryview(bytearray(num_bytes)).cast("d")
    with open(path, "a+b") as file:
        file.truncate(num_bytes)  # the first to come makes it
        return memoryview(mmap.mmap(file.fileno(), num_bytes)).cast("d")
