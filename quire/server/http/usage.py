"""What each key has used, under its name: requests, refusals, tokens, and those of them that a cache had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.server.http.trail import NO_KEY, Trail
from quire.server.processes.shared_counters import SharedCounters

MAX_NAMES = 64  # with counts of their own
OTHERS = "others"  # the name of all further keys
FIELDS = {
    "requests": "Requests by the name of their key.",
    "failures": "Requests answered with an error, by the name of their key.",
    "prompt_tokens": "Prompt tokens of requests that the engine got, whatever became of them.",
    "cached_tokens": "Those of them that the prefix cache had, of requests whose first token came.",
    "generation_tokens": "Generated tokens.",
}


class KeyUsage(Collector):
    """names: of all keys; the same in all processes."""

    def __init__(self, counters: SharedCounters, names: Iterable[str]) -> None:
        kept = list(dict.fromkeys([*names, NO_KEY]))
        self.names = kept if len(kept) <= MAX_NAMES else [*kept[: MAX_NAMES - 1], OTHERS]
        self._slots = {name: counters.take(len(FIELDS)) for name in self.names}
        self._counters, self._mine = counters, counters.mine

    def count(self, trail: Trail) -> None:
        slot = self._slots.get(trail.key, self._slots[self.names[-1]])
        counts = (1, trail.status >= 400, trail.prompt_tokens, trail.cached_tokens, trail.output_tokens)
        for offset, count in enumerate(counts):
            self._mine[slot + offset] += count

    def totals(self) -> dict[str, dict[str, int]]:
        """By name, those of all processes; who never came is left out."""
        found = {}
        for name, slot in self._slots.items():
            counts = [int(self._counters.sum(slot + offset)) for offset in range(len(FIELDS))]
            if counts[0]:
                found[name] = dict(zip(FIELDS, counts, strict=True))
        return found

    def collect(self) -> Iterator[Metric]:
        totals = self.totals()
        for field, text in FIELDS.items():
            family = CounterMetricFamily(f"quire:key_{field}", text, labels=["key"])
            for name, counts in totals.items():
                family.add_metric([name], counts[field])
            yield family
