"""The door: a request that would wait too long is refused before anything is done for it.

Two bounds. No request is let in whose wait, as predicted, is longer than `max_queue_seconds`: a burst may fill the
queue up to there. An *overload* is a burst that does not end: for two seconds more came than had its turn, and the
wait was long already. A queue of that length would stand for as long as the overload lasts: everybody's first
token would be late by it, and nothing be won, as the engine is as busy with a short one. So while an overload lasts the
queue is kept short. It is over once nobody has had to be refused for a while.

Who keeps a fixed number of requests open, however many, sends no more than is answered: such a queue stands, but it
does not grow, and it is no overload.

While an engine that died is started again, who comes waits for it, unless that will take too long or too many do.

What is let in is never refused later. With several front ends each decides by what all of them have let in.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from quire.scheduling.load import predict_wait
from quire.server.http.errors import ApiError
from quire.server.metrics import Metrics
from quire.server.processes.shared_counters import UNSEEN
from quire.types.output import QueueStats
from quire.types.request import BACKGROUND

if TYPE_CHECKING:
    from quire.frontend.async_engine import Outage

LONG_WAIT = 2.0  # seconds; the queue is not kept shorter than this, nor …
SHORT_QUEUE = 4  # … than so many requests
WINDOW = 0.4  # seconds in which what came is compared with what had its turn
GROWING, LATEST = 4, 6  # so many windows, of so many, with more than ever in the latest: a burst is over sooner
CALM = 4  # so many without anybody refused end it
GROWTH = 0.02  # of what had its turn; less is noise


class Overload:
    """Tells an overload from a burst. It looks whenever a request comes."""

    def __init__(self) -> None:
        self.is_on = False
        self._growing: deque[bool] = deque(maxlen=LATEST)  # the latest windows
        self._num_calm = 0  # latest windows in which nobody was refused
        self._start = -math.inf
        self._shortest = math.inf  # wait in this window
        self._most = 0  # requests present in this window …
        self._mosts: deque[int] = deque([0], maxlen=LATEST)  # … and in the latest
        self._begun = self._refused = 0  # at its start

    def see(self, now: float, wait: float, present: int, begun: int, refused: int) -> None:
        """now: seconds of some clock; wait: of a request that comes now; present: requests that wait or run; begun,
        refused: requests ever."""
        if now - self._start >= WINDOW:
            self._close(begun, refused)
            self._start, self._begun, self._refused = now, begun, refused
            self._mosts.append(self._most)
            self._most, self._shortest = 0, math.inf
        if not wait:  # nobody has come for long, or nobody waits any more: a burst that begins now is none of it
            self.is_on = False
            self._growing.clear()
        self._most = max(self._most, present)
        self._shortest = min(self._shortest, wait)

    def _close(self, begun: int, refused: int) -> None:
        num_refused = refused - self._refused
        surplus = self._most + num_refused - max(self._mosts)
        self._growing.append(self._shortest > LONG_WAIT and surplus > GROWTH * (begun - self._begun))
        self._num_calm = 0 if num_refused else self._num_calm + 1
        if sum(self._growing) >= GROWING:
            self.is_on = True
        elif self._num_calm >= CALM:
            self.is_on = False


class Door:
    """max_seconds: see SchedulerConfig.max_queue_seconds; 0: nobody is refused here. metrics: where it counts.

    max_queued: requests that may wait while there is no engine to count them; None: any number.
    """

    def __init__(
        self,
        max_seconds: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_queued: int | None = None,
    ) -> None:
        self._max_seconds = max_seconds
        self._metrics = metrics
        self._counters = metrics.counters
        self._clock = clock
        self._queue = QueueStats()
        self._num_preparing = 0  # let in, and not handed to the engine yet
        self._handed: deque[float] = deque()  # when requests were of which the engine has not told yet
        self._overload = Overload()
        self._max_queued = max_queued
        self.outage: Callable[[], Outage | None] = lambda: None

    def report(self, queue: QueueStats) -> None:
        """The engine's latest."""
        self._queue = queue
        while self._handed and self._handed[0] < queue.as_of:
            self._handed.popleft()
        self._note()

    def wait(self, priority: int = 0) -> float:
        """Seconds that a request which comes now will probably wait for its turn."""
        outage = self.outage()
        wait = predict_wait(self._queue, priority, int(self._counters.sum(UNSEEN)))
        return wait if outage is None else wait + outage.seconds_left

    def retry_after(self, priority: int = 0) -> int:
        """Seconds, as told to who is refused: until all that waits now has had its turn."""
        return max(1, math.ceil(self.wait(priority)))

    def enter(self, priority: int = 0) -> None:
        """Let a request in: `hand_over` or `give_up` must follow. Raises ApiError 503 if it would wait too long."""
        outage, wait = self.outage(), self.wait(priority)
        if outage is None:
            if self._max_seconds and wait > self._bound():
                self._refuse(f"the server is overloaded: a request would wait for about {wait:.0f} s", priority)
        elif 0 < self._max_seconds < wait or (self._max_queued is not None and self._num_waiting >= self._max_queued):
            self._refuse(f"{outage}; a request would wait for about {wait:.0f} s", priority)
        self._num_preparing += 1
        self._note()

    def _refuse(self, message: str, priority: int) -> NoReturn:
        self._metrics.refuse("overloaded")
        raise ApiError(503, message, retry_after=self.retry_after(priority))

    @property
    def _num_waiting(self) -> int:
        return int(self._counters.sum(UNSEEN)) + sum(each.waiting for each in self._queue.classes)

    def _bound(self) -> float:
        """Seconds that a request may wait."""
        waiting, running = int(self._counters.sum(UNSEEN)), 0
        for each in self._queue.classes:
            if each.priority != BACKGROUND:
                waiting, running = waiting + each.waiting, running + each.running
        overload = self._overload
        overload.see(
            self._clock(),
            self.wait(BACKGROUND - 1),
            waiting + running,
            self._queue.num_begun,
            self._metrics.total_rejected,
        )
        if overload.is_on and waiting >= SHORT_QUEUE:
            return min(LONG_WAIT, self._max_seconds)
        return self._max_seconds

    def hand_over(self, count: int) -> None:
        """The engine gets a request that was let in: so many of its own."""
        self._num_preparing -= 1
        self._handed.extend([self._clock()] * count)
        self._note()

    def give_up(self) -> None:
        """A request that was let in will not get to the engine."""
        self._num_preparing -= 1
        self._note()

    def _note(self) -> None:
        self._counters.mine[UNSEEN] = self._num_preparing + len(self._handed)
