"""The stat loggers of an engine, told what it reports to the process that has started it."""

from __future__ import annotations

import time

from quire.config.resolve import Resolved
from quire.config.runtime import STAT_LOGGERS
from quire.foundation.errors import ConfigError
from quire.foundation.log import get_logger
from quire.observe.stat_logger import StatLogger, StatLoggerSetup
from quire.types.output import EngineStats

OPTION = "stat_loggers"
LINE = "log"  # the name of the line in the log, which is there unless it is switched off
_log = get_logger(__name__)


class StatLoggers:
    """Makes those that `resolved` asks for. Raises ConfigError for one that cannot be made."""

    def __init__(self, resolved: Resolved, number: int = 0) -> None:
        observe = resolved.config.observe
        names = [*(() if observe.disable_log_stats else (LINE,)), *observe.stat_loggers]
        setup = StatLoggerSetup(
            resolved.config.model.names[0],
            resolved.device,
            resolved.max_num_seqs,
            number,
            resolved.config.runtime.data_parallel_size,
        )
        self._due = {_make(name, setup): 0.0 for name in dict.fromkeys(names)}  # time.monotonic() of the next record
        self._last: EngineStats | None = None
        self.wants_end = any(name != LINE for name in names)  # somebody asks for the very last counters

    def take(self, stats: EngineStats, now: float | None = None) -> None:
        """A report of the engine. now: seconds, time.monotonic()."""
        now = time.monotonic() if now is None else now
        self._last = stats
        rests = not (stats.num_running or stats.num_waiting)
        for logger, due in list(self._due.items()):
            if rests or now >= due:
                self._due[logger] = now + logger.interval
                self._record(logger, stats)

    def close(self, stats: EngineStats | None = None) -> None:
        """The end, with the last counters; None: those of the last report. Only the first call counts."""
        stats = stats or self._last
        for logger in list(self._due):
            if stats is not None:
                self._record(logger, stats)
            try:
                logger.close()
            except Exception:
                _log.exception("the stat logger %s did not close", type(logger).__name__)
        self._due.clear()

    def _record(self, logger: StatLogger, stats: EngineStats) -> None:
        try:
            logger.record(stats)
        except Exception:
            _log.exception("the stat logger %s failed and is told nothing any more", type(logger).__name__)
            self._due.pop(logger, None)


def _make(name: str, setup: StatLoggerSetup) -> StatLogger:
    found = STAT_LOGGERS.get(name, OPTION)
    try:
        made: StatLogger = found(setup)
    except Exception as error:
        raise ConfigError(
            f"the stat logger {name!r} cannot be made: {type(error).__name__}: {error}", OPTION
        ) from error
    return made
