"""The last quarter of an hour in numbers, one row a second: what the dashboard's charts show when it is opened.

Rows are made when the core reports, and when somebody asks: an idle server with no visitor does nothing. A row is what
/metrics would say of the second before, so several front ends tell the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from quire.server.metrics import Histogram, Metrics
from quire.types.output import EngineStats

KEPT = 900  # rows
EVERY = 1.0  # seconds
WINDOW = 15  # rows that a percentile looks at
SHARES = (0.5, 0.9, 0.99)


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rates are per second since the row before. None: there was nothing to tell."""

    time: float  # time.time()
    prompt_rate: float  # tokens
    cached_rate: float  # of these, from the prefix cache
    generation_rate: float
    running: int
    waiting: int
    refused_rate: float  # requests
    failed_rate: float  # answers that ended with an error
    preemption_rate: float
    kv_usage: float  # 0 … 1
    first_token: tuple[float | None, ...]  # seconds, by SHARES, of the requests that ended in WINDOW rows
    gap: tuple[float | None, ...]  # seconds between outputs of a stream, likewise
    queue: tuple[float | None, ...]
    accepted: float | None  # share of the draft tokens


class _Seen(msgspec.Struct, frozen=True):
    """Counters at the time of a row."""

    at: float  # time.monotonic()
    prompt: int
    cached: int
    generated: int
    refused: int
    failed: int
    preemptions: int
    drafted: int
    accepted: int
    first_token: list[float]
    gap: list[float]
    queue: list[float]


class History:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._rows: deque[Row] = deque(maxlen=KEPT)
        self._seen: deque[_Seen] = deque(maxlen=WINDOW + 1)

    def note(self, stats: EngineStats) -> None:
        """Add a row if the last one is a second old."""
        now = time.monotonic()
        if self._seen and now - self._seen[-1].at < EVERY:
            return
        seen = self._look(stats, now)
        if self._seen:
            self._rows.append(self._row(stats, self._seen[-1], self._seen[0], seen))
        self._seen.append(seen)

    def after(self, moment: float) -> list[Row]:
        """The rows that are younger than this, time.time()."""
        return [row for row in self._rows if row.time > moment]

    def _look(self, stats: EngineStats, now: float) -> _Seen:
        metrics = self._metrics
        return _Seen(
            now, stats.prompt_tokens, stats.cached_tokens, stats.generation_tokens, metrics.total_rejected,
            metrics.num_ended("error"), stats.num_preemptions, stats.num_draft_tokens, stats.num_accepted_tokens,
            metrics.first_token.counts(), metrics.token_gap.counts(), metrics.queue.counts(),
        )  # fmt: skip

    def _row(self, stats: EngineStats, before: _Seen, first: _Seen, now: _Seen) -> Row:
        seconds = now.at - before.at

        def rate(name: str) -> float:
            return round(max(0.0, float(getattr(now, name) - getattr(before, name))) / seconds, 2)

        def shares(name: str, histogram: Histogram) -> tuple[float | None, ...]:
            counts = [b - a for a, b in zip(getattr(first, name), getattr(now, name), strict=True)]
            return percentiles(histogram.bounds, counts)

        drafted = now.drafted - before.drafted
        return Row(
            time=round(time.time(), 2),
            prompt_rate=rate("prompt"),
            cached_rate=rate("cached"),
            generation_rate=rate("generated"),
            running=stats.num_running,
            waiting=stats.num_waiting,
            refused_rate=rate("refused"),
            failed_rate=rate("failed"),
            preemption_rate=rate("preemptions"),
            kv_usage=round(stats.kv_usage, 4),
            first_token=shares("first_token", self._metrics.first_token),
            gap=shares("gap", self._metrics.token_gap),
            queue=shares("queue", self._metrics.queue),
            accepted=round((now.accepted - before.accepted) / drafted, 3) if drafted > 0 else None,
        )


def percentiles(
    bounds: Sequence[float], counts: Sequence[float], shares: Sequence[float] = SHARES
) -> tuple[float | None, ...]:
    """Of values counted by bucket (one more than there are bounds), evenly spread within each; None if there are none.

    What lies behind the last bound is taken to be there.
    """
    total = sum(counts)
    if total <= 0:
        return tuple(None for _ in shares)
    found = []
    for share in shares:
        rank, below = share * total, 0.0
        for i, count in enumerate(counts):
            if count and below + count >= rank:
                low = bounds[i - 1] if i else 0.0
                high = bounds[i] if i < len(bounds) else bounds[-1]
                found.append(round(low + (high - low) * (rank - below) / count, 5))
                break
            below += count
    return tuple(found)
