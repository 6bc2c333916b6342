"""What the engines before this one have counted: counters go on where they stood."""

from __future__ import annotations

from itertools import zip_longest

import msgspec

from quire.observe.engine_metrics import COUNTERS, DRAFT_COUNTERS, FLOOR_COUNTERS, WORK_COUNTERS
from quire.types.output import EngineStats

_COUNTERS = (*COUNTERS, *DRAFT_COUNTERS, *WORK_COUNTERS, *FLOOR_COUNTERS)


class Totals:
    """before: the last report of the engine whose place another one takes; None: it is the first."""

    def __init__(self, before: EngineStats | None) -> None:
        self._before = before
        self._num_begun = before.queue.num_begun if before is not None and before.queue is not None else 0

    def add_to(self, stats: EngineStats) -> None:
        before = self._before
        if before is None:
            return
        for name in _COUNTERS:
            setattr(stats, name, getattr(stats, name) + getattr(before, name))
        stats.num_accepted_per_pos = [
            sum(counts) for counts in zip_longest(stats.num_accepted_per_pos, before.num_accepted_per_pos, fillvalue=0)
        ]
        stats.last_step_time = stats.last_step_time or before.last_step_time
        for phase, seconds in before.phase_seconds.items():
            stats.phase_seconds[phase] = stats.phase_seconds.get(phase, 0.0) + seconds
        if stats.queue is not None:
            stats.queue = msgspec.structs.replace(stats.queue, num_begun=stats.queue.num_begun + self._num_begun)


def keep_rising(stats: EngineStats, before: EngineStats) -> None:
    """What was counted after an engine's last report to its starter may have been seen by others: it is not taken
    back."""
    stats.num_accepted_per_pos = [
        max(counts) for counts in zip_longest(stats.num_accepted_per_pos, before.num_accepted_per_pos, fillvalue=0)
    ]
    for name in _COUNTERS:
        setattr(stats, name, max(getattr(stats, name), getattr(before, name)))
    for mine, older in zip(stats.engines, before.engines, strict=False):
        keep_rising(mine, older)
