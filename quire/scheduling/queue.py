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
        self._aside: dict[str, list[tuple[Rank, Request]]] = {}  # heaps, by the adapter that has no slot
        self.classes: dict[int, tuple[int, int]] = {}  # (requests, prompt tokens) by the first part of their rank

    def __len__(self) -> int:
        return self._waiting

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.rank, request))
        self._count(request, 1)

    def peek(self) -> Request | None:
        heap = self._heap
        while heap and heap[0][1].is_finished:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Request:
        """Take the request that `peek` shows. Raises IndexError if there is none."""
        if self.peek() is None:
            raise IndexError("no request waits")
        request = heapq.heappop(self._heap)[1]
        self._count(request, -1)
        return request

    def set_aside(self) -> None:
        """The request that `peek` shows waits for a slot of its adapter, and others go on."""
        request = self.peek()
        if request is not None and request.spec.lora is not None:
            heapq.heappush(self._aside.setdefault(request.spec.lora.key, []), heapq.heappop(self._heap))

    def first_aside(self) -> Request | None:
        """The best of those that stand aside."""
        for key, heap in list(self._aside.items()):
            while heap and heap[0][1].is_finished:
                heapq.heappop(heap)
            if not heap:
                del self._aside[key]
        return min((heap[0] for heap in self._aside.values()), default=(None, None))[1]

    def bring_back(self, key: str) -> None:
        """Those that stood aside for want of this adapter take their places again."""
        for entry in self._aside.pop(key, ()):
            if not entry[1].is_finished:
                heapq.heappush(self._heap, entry)

    @property
    def num_aside(self) -> int:
        """Requests that wait for a slot of their adapter."""
        return sum(not request.is_finished for heap in self._aside.values() for _, request in heap)

    @property
    def adapters(self) -> list[str]:
        """Names of those that requests wait with."""
        entries = [*self._heap, *(entry for heap in self._aside.values() for entry in heap)]
        return sorted({r.spec.lora.name for _, r in entries if r.spec.lora is not None and not r.is_finished})

    def forget(self, request: Request) -> None:
        """It has just finished while it waited."""
        self._count(request, -1)
        if len(self._heap) > 2 * self._waiting + 64:
            self._heap = [entry for entry in self._heap if not entry[1].is_finished]
            heapq.heapify(self._heap)

    def _count(self, request: Request, change: int) -> None:
        self._waiting += change
        requests, tokens = self.classes.get(request.rank[0], (0, 0))
        if requests + change:
            self.classes[request.rank[0]] = requests + change, tokens + change * request.num_prompt
        else:
            del self.classes[request.rank[0]]
