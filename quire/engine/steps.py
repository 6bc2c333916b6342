"""The latest steps as they were measured: for who looks in, for the statistics, and for the record of a failure."""

from __future__ import annotations

import itertools
from collections import deque

from quire.types.output import EngineStats
from quire.types.view import StepView

KEPT = 2048


class Steps:
    """A ring. Costs two microseconds a step, whether somebody looks or not."""

    def __init__(self) -> None:
        self._kept: deque[StepView] = deque(maxlen=KEPT)
        self._num = 0
        self.prompt_tokens = 0  # computed ever
        self._tokens: list[int] = []
        self._seconds: list[float] = []
        self._gaps: list[float] = []

    def add(self, step: StepView) -> None:
        self._kept.append(step)
        self._num += 1
        self.prompt_tokens += step.prompt_tokens
        self._tokens.append(step.prompt_tokens + step.decodes)
        self._seconds.append(step.seconds)
        self._gaps.append(step.gap)

    @property
    def num_steps(self) -> int:
        return self._num

    @property
    def last_time(self) -> float:
        """time.time() when the latest ended; 0: there was none."""
        return self._kept[-1].ended if self._kept else 0.0

    def tell(self, stats: EngineStats) -> None:
        """Those since the last time."""
        stats.step_tokens, self._tokens = self._tokens, []
        stats.step_seconds, self._seconds = self._seconds, []
        stats.step_gaps, self._gaps = self._gaps, []

    def after(self, moment: float) -> list[StepView]:
        """Those that ended later, oldest first. A time and not a number: one says it to several cores, and to another
        engine in the place of one, which counts its steps anew."""
        newer = itertools.takewhile(lambda each: each.ended > moment, reversed(self._kept))
        return list(newer)[::-1]
