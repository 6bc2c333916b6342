"""Prometheus metrics of a router."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.router.backend import Backend

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)


class RouterMetrics(Collector):
    """backends: those that there are now."""

    def __init__(self, backends: Callable[[], Sequence[Backend]]) -> None:
        self._backends = backends
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.requests = Counter(
            "quire:router_requests", "Answers by server and status.", ["backend", "status"], registry=self._registry
        )
        self.retries = Counter(
            "quire:router_retries", "Requests that went to another server.", ["backend"], registry=self._registry
        )
        self.broken = Counter(
            "quire:router_broken_answers", "Answers that a server broke off.", ["backend"], registry=self._registry
        )
        self.refused = Counter("quire:router_refused", "Requests that no server took.", registry=self._registry)
        self.cached = Counter(
            "quire:router_matched_bytes", "Bytes of prompts sent where they were known.", registry=self._registry
        )
        self.first_byte = Histogram(
            "quire:router_first_byte_seconds", "Request to the first of its answer.", ["backend"],
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        gauges: dict[str, tuple[str, Callable[[Backend], float]]] = {
            "quire:router_backend_up": ("1 if the server takes requests.", lambda b: float(b.takes_requests)),
            "quire:router_backend_in_flight": ("Requests under way.", lambda b: float(b.in_flight)),
            "quire:router_backend_others": ("Requests that it has from elsewhere.", lambda b: float(b.others)),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(name, text, labels=["backend"])
            for backend in self._backends():
                family.add_metric([backend.url], value(backend))
            yield family

    def render(self) -> bytes:
        """The Prometheus text of now."""
        return generate_latest(self._registry)
