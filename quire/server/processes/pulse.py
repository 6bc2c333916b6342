"""Signs of life: of the engine, which a process of the server asks for one, and of that process itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.foundation.errors import EngineDeadError
from quire.foundation.log import get_logger
from quire.server.processes.shared_counters import BEATS, HANGS, SharedCounters

if TYPE_CHECKING:
    from quire.frontend.async_engine import AsyncLLM

BEAT_SECONDS = 1.0  # between two looks; less where a time limit is shorter
log = get_logger(__name__)


def beat_seconds(*limits: float) -> float:
    """Often enough for these limits, in seconds (0: none)."""
    return min([BEAT_SECONDS, *(limit / 4 for limit in limits if limit > 0)])


class Pings:
    """An engine that has said nothing for `interval` seconds (0: never mind) is asked for a sign of life.

    A busy one speaks all the time and is never asked.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._asked: float | None = None  # time.monotonic() of a question; None: none is open

    def look(self, engine: AsyncLLM) -> None:
        """Ask if it is time."""
        now = time.monotonic()
        if self._interval <= 0 or self.unanswered_for(engine) > 0:
            return
        self._asked = None
        if now - engine.last_heard >= self._interval:
            self._asked = now
            engine.ping()

    def unanswered_for(self, engine: AsyncLLM) -> float:
        """Seconds; 0 if no question is open."""
        if self._asked is None or engine.last_heard >= self._asked:
            return 0.0
        return max(time.monotonic() - self._asked, 1e-9)


class Pulse:
    """The timer of a process of the server: it looks after the engine, logs when a hang begins and when it is over, and
    tells a supervisor that this process lives.

    look: asks the engine if it is time; problem: says how the engine hangs, None if it does not.
    Of several processes that find the same hang one logs it.
    """

    def __init__(
        self, counters: SharedCounters, seconds: float, look: Callable[[], None], problem: Callable[[], str | None]
    ) -> None:
        self._counters = counters
        self._seconds = seconds
        self._look = look
        self._problem = problem
        self._began: float | None = None  # of the hang that is not over
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Needs a running event loop."""
        self._beat()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._beat)
        self._counters.mine[BEATS] += 1
        try:
            self._look()
        except EngineDeadError:
            pass  # others tell
        self._log_changes()

    def _log_changes(self) -> None:
        problem = self._problem()
        if problem is not None and self._began is None:
            self._began = time.monotonic()
            if not self._counters.sum(HANGS):
                log.error("%s; /health and /readyz say 503 until it goes on", problem)
            self._counters.mine[HANGS] = 1
        elif problem is None and self._began is not None:
            self._counters.mine[HANGS] = 0
            if not self._counters.sum(HANGS):
                log.warning("the engine goes on, %.1f s after it was found to hang", time.monotonic() - self._began)
            self._began = None
