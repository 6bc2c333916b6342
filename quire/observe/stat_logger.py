"""What a stat logger is: `quire.StatLogger`. It is told what an engine counts, and takes it wherever it is wanted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from quire.types.output import EngineStats


@dataclass(frozen=True, slots=True)
class StatLoggerSetup:
    """What a stat logger is made with."""

    model_name: str  # as replies and metrics have it
    device: str  # cuda, cpu, torch:mps, …
    max_num_seqs: int
    engine: int = 0  # its number, where there are several
    num_engines: int = 1


class StatLogger(ABC):
    """Is told the statistics of an engine, as long as it works. Derive, and override `record`.

    One object serves an engine, and those that take its place if it dies, in the process that has started it: the
    user's own of `LLM` and `AsyncLLM`, the server's first of `quire serve`. Outputs wait while it works, so it shall
    work for microseconds. One that raises is told nothing any more, and nothing else suffers.
    """

    interval: ClassVar[float] = 1.0
    """Seconds from one record to the next; 0: every report of the engine, about five a second while it works."""

    def __init__(self, setup: StatLoggerSetup) -> None:
        self.setup = setup

    @abstractmethod
    def record(self, stats: EngineStats) -> None:
        """Take counters since the start and gauges of now. It is called once an interval, when the engine comes to
        rest, and with the last ones before `close`."""

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """The engine is shut down, or its owner ends."""
