"""What single steps of a core took, by phase: where a slow one differs from the others."""

from __future__ import annotations

import gc
import time
from typing import Any

from benchmarks.serve_load import percentile
from quire.observe.profiling import PhaseClock

Step = dict[str, float]  # seconds by phase; "gc" is part of the others


class Laps(PhaseClock):
    """A step is what lies between two results: the end of one "wait" and that of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._step: Step = {}
        self._collecting = 0.0
        gc.callbacks.append(self._collect)

    def lap(self, phase: str) -> None:
        before = self.seconds.get(phase, 0.0)
        super().lap(phase)
        self._step[phase] = self._step.get(phase, 0.0) + self.seconds[phase] - before
        if phase == "wait":
            self.steps.append(self._step)
            self._step = {}

    def _collect(self, when: str, _info: dict[str, Any]) -> None:
        now = time.perf_counter()
        if when == "start":
            self._collecting = now
        else:
            self._step["gc"] = self._step.get("gc", 0.0) + now - self._collecting


def spread(steps: list[Step]) -> dict[str, list[float]]:
    """By phase, milliseconds a step: the middle one, the 99th percentile and the longest."""
    found = {}
    for phase in sorted({phase for step in steps for phase in step}):
        values = [step.get(phase, 0.0) for step in steps]
        found[phase] = [_ms(percentile(values, 50)), _ms(percentile(values, 99)), _ms(max(values))]
    return found


def slowest(steps: list[Step], share: float = 0.01) -> Step:
    """By phase, milliseconds: the mean of the steps that took longest, and of their sum ("step")."""
    ranked = sorted(steps, key=_length)[-max(1, round(len(steps) * share)) :]
    phases = sorted({phase for step in ranked for phase in step})
    means = {phase: _ms(sum(step.get(phase, 0.0) for step in ranked) / len(ranked)) for phase in phases}
    return {"step": _ms(sum(map(_length, ranked)) / len(ranked)), **means}


def _length(step: Step) -> float:
    return sum(seconds for phase, seconds in step.items() if phase != "gc")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
