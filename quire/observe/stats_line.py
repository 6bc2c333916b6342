"""The line of statistics that a busy engine logs now and then."""

from __future__ import annotations

import time

from quire.foundation.log import get_logger
from quire.observe.stat_logger import StatLogger, StatLoggerSetup
from quire.types.output import EngineStats

_log = get_logger(__name__)


class LogLine(StatLogger):
    """Logs the line."""

    interval = 0.0  # the line knows itself when it is due

    def __init__(self, setup: StatLoggerSetup) -> None:
        super().__init__(setup)
        self._line = StatsLine()

    def record(self, stats: EngineStats) -> None:
        if (line := self._line.take(stats)) is not None:
            _log.info(line if self.setup.num_engines == 1 else f"engine {self.setup.engine}: {line}")


class StatsLine:
    """Turns reports of the core (EngineStats, a few a second while it works) into a line every `every` seconds."""

    def __init__(self, every: float = 10.0) -> None:
        self._every = every
        self._window = EngineStats()  # what the rates are counted from
        self._window_start = 0.0
        self._last_report = 0.0

    def take(self, stats: EngineStats, now: float | None = None) -> str | None:
        """The line, if one is due. `now`: seconds, time.monotonic()."""
        now = time.monotonic() if now is None else now
        paused = now - self._last_report > self._every
        self._last_report = now
        seconds = now - self._window_start
        if not paused and seconds < self._every:
            return None
        before, self._window, self._window_start = self._window, stats, now
        if paused:
            return None  # a rate over the pause would tell nothing
        queries, hits = stats.prefix_queries - before.prefix_queries, stats.prefix_hits - before.prefix_hits
        parts = [
            f"prompt {(stats.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s",
            f"generation {(stats.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s",
            f"running {stats.num_running}",
            f"waiting {stats.num_waiting}",
            f"KV cache {stats.kv_usage:.1%}",
        ]
        if queries:
            parts.append(f"prefix hits {hits / queries:.1%}")
        if drafted := stats.num_draft_tokens - before.num_draft_tokens:
            accepted = stats.num_accepted_tokens - before.num_accepted_tokens
            parts.append(f"drafts accepted {accepted / drafted:.1%} of {drafted / seconds:.1f} tokens/s")
        if preemptions := stats.num_preemptions - before.num_preemptions:
            parts.append(f"preemptions {preemptions}")
        return ", ".join(parts)
