"""The requests that wait for a seat, best rank first.

The rank decides both policies: (0, arrival) is first come first served, (priority, arrival) is by priority, and
(BACKGROUND, arrival) is behind all others under both. A preempted request keeps its rank, so it stands before all of
its class that arrived after it.
"""

from __future__ import annotations

import heapq

from quire.scheduling.request import Rank, Request


class WaitingQueue:
    """A heap; requests that finish while they wait stay in it until they surface or outnumber the others."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Request]] = []
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.rank, request))
        self._waiting += 1

    def peek(self) -> Request | None:
        heap = self._heap
        while heap and heap[0][1].is_finished:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Request:
        """Take the request that `peek` shows. Raises IndexError if there is none."""
        if self.peek() is None:
            raise IndexError("no request waits")
        self._waiting -= 1
        return heapq.heappop(self._heap)[1]

    def forget_finished(self) -> None:
        """One waiting request has just finished."""
        self._waiting -= 1
        if len(self._heap) > 2 * self._waiting + 64:
            self._heap = [entry for entry in self._heap if not entry[1].is_finished]
            heapq.heapify(self._heap)
