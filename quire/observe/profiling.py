"""Where the time of a loop goes: a clock that is told after each phase what it was, so that the phases add up."""

from __future__ import annotations

import time


class PhaseClock:
    """`lap("plan")` books the time since the previous lap on "plan". Costs about 0.2 µs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """What came before is booked on nothing."""
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
