"""Every HTTP request by handler, method and status, refusals included, under the names that dashboards know.

Where they are counted is outside of keys and limits. Handlers are the paths as routes declare them, so that an id in a
path makes no metric of its own; what no route knows has the handler "none".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.foundation.log import get_logger
from quire.server.http.trail import REQUEST_ID, TRAIL, Trail, Trails
from quire.server.http.usage import KeyUsage
from quire.server.metrics import Histogram, bounds
from quire.server.processes.shared_counters import SharedCounters

# Probes and their like would drown what clients do.
NOT_COUNTED = frozenset(
    {
        "/metrics",
        "/dashboard/state",
        "/dashboard/door",
        "/health",
        "/load",
        "/ping",
        "/version",
        "/server_info",
        "/livez",
        "/readyz",
        "/startupz",
    }
)
UNKNOWN = "none"
access_log = get_logger("quire.access")
if TYPE_CHECKING:
    from quire.server.tracing import Tracing

_EVERYWHERE = ("HEAD", "OPTIONS", "OTHER")
_STATUSES = ("2xx", "3xx", "4xx", "5xx")
_FEW_BOUNDS = (0.1, 0.5, 1.0)
_MANY_BOUNDS = bounds("0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1 1.5 2 2.5 3 3.5 4 4.5 5 7.5 10 30 60")


class Handler:
    """What is counted of one path; the same slots of the counters in all processes."""

    def __init__(self, counters: SharedCounters, name: str, methods: Iterable[str]) -> None:
        self.name = name
        self.methods = [*dict.fromkeys([*sorted(methods), *_EVERYWHERE])]
        self._statuses = {method: counters.take(len(_STATUSES)) for method in self.methods}
        self._seconds = {method: Histogram(counters, "", "", _FEW_BOUNDS) for method in self.methods}
        self._requests, self._bytes_in, self._bytes_out = (counters.take(1) for _ in range(3))
        self._counters, self._mine = counters, counters.mine

    def count(self, method: str, status: int, seconds: float, bytes_in: int, bytes_out: int) -> None:
        method = method if method in self._statuses else "OTHER"
        self._mine[self._statuses[method] + min(max(status // 100 - 2, 0), 3)] += 1
        self._seconds[method].observe(seconds)
        self._mine[self._requests] += 1
        self._mine[self._bytes_in] += bytes_in
        self._mine[self._bytes_out] += bytes_out

    def add_to(
        self, requests: CounterMetricFamily, seconds: HistogramMetricFamily, sizes: Iterable[SummaryMetricFamily]
    ) -> None:
        """What has been seen at least once."""
        for method in self.methods:
            counts = [self._counters.sum(self._statuses[method] + i) for i in range(len(_STATUSES))]
            for status, count in zip(_STATUSES, counts, strict=True):
                if count:
                    requests.add_metric([self.name, status, method], count)
            if any(counts):
                self._seconds[method].add_to(seconds, [self.name, method])
        if seen := self._counters.sum(self._requests):
            for family, slot in zip(sizes, (self._bytes_in, self._bytes_out), strict=True):
                family.add_metric([self.name], int(seen), self._counters.sum(slot))


class HttpMetrics(Collector):
    def __init__(self, counters: SharedCounters, routers: Iterable[APIRouter], keys: Iterable[str] = ()) -> None:
        """keys: their names."""
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        methods: dict[str, set[str]] = {}
        for route in routes:
            if route.path not in NOT_COUNTED:
                methods.setdefault(route.path, set()).update(route.methods or ())
        self._unknown = Handler(counters, UNKNOWN, ("GET", "POST", "PUT", "PATCH", "DELETE"))
        self._handlers = {path: Handler(counters, path, names) for path, names in methods.items()}
        self._patterns = [(r.path_regex, self._handlers[r.path]) for r in routes if "{" in r.path]
        self._all_seconds = Histogram(counters, "http_request_duration_highr_seconds", "Of all requests.", _MANY_BOUNDS)
        self.usage = KeyUsage(counters, keys)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._registry.register(self.usage)

    def handler_of(self, path: str) -> Handler | None:
        """None for a path that is not counted."""
        if path in NOT_COUNTED:
            return None
        if path in self._handlers:
            return self._handlers[path]
        return next((handler for regex, handler in self._patterns if regex.match(path)), self._unknown)

    def count(self, handler: Handler, method: str, status: int, seconds: float, bytes_in: int, bytes_out: int) -> None:
        handler.count(method, status, seconds, bytes_in, bytes_out)
        self._all_seconds.observe(seconds)

    def render(self) -> bytes:
        """The Prometheus text of now."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("http_requests", "Requests.", labels=["handler", "status", "method"])
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "Until the reply is sent.", labels=["handler", "method"]
        )
        sizes = [
            SummaryMetricFamily(f"http_{kind}_size_bytes", f"Bytes of the {kind}'s body.", labels=["handler"])
            for kind in ("request", "response")
        ]
        for handler in (*self._handlers.values(), self._unknown):
            handler.add_to(requests, seconds, sizes)
        yield from (requests, seconds, *sizes, self._all_seconds.family([], [[]]))


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


class CountingMiddleware:
    """Counts what goes by, however it ends. A client that leaves before the reply begins counts as 4xx (499)."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        trails: Trails,
        *,
        writes_log: bool = False,
        find_tracing: Callable[[str], Tracing | None],
    ) -> None:
        """writes_log: a line for each. find_tracing: of a route."""
        self._find_tracing = find_tracing
        self.app = app
        self._metrics = metrics
        self._trails = trails
        self._writes_log = writes_log

    def _end(self, trail: Trail) -> None:
        self._trails.end(trail)
        self._metrics.usage.count(trail)
        if trail.trace is not None:
            trail.trace.end(trail)
            trail.trace = None
        if self._writes_log:
            access_log.info("request", extra=trail.line())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = None
        if scope["type"] == "http":
            handler = self._metrics.handler_of(scope["path"])
        if handler is None:
            await self.app(scope, receive, send)
            return
        began, status, bytes_out, is_counted = time.perf_counter(), 499, 0, False
        trail = scope[TRAIL] = Trail(scope["method"], handler.name, scope.get(REQUEST_ID, ""))
        self._trails.begin(trail)
        if (tracing := self._find_tracing(handler.name)) is not None:
            trail.trace = tracing.begin(scope["headers"], trail.began)
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        bytes_in = int(announced) if announced.isdigit() and len(announced) < 20 else 0

        def count() -> None:
            nonlocal is_counted
            if not is_counted:
                is_counted = True
                seconds = time.perf_counter() - began
                self._metrics.count(handler, scope["method"], status, seconds, bytes_in, bytes_out)
                trail.status, trail.seconds = status, seconds
                self._end(trail)

        async def watched(message: Message) -> None:
            nonlocal status, bytes_out
            if message["type"] == "http.response.start":
                status = message["status"]
                if trail.trace is not None:
                    message["headers"] = [*message.get("headers", ()), *_encoded(trail.trace.names)]
            else:
                bytes_out += len(message.get("body", b""))
                if not message.get("more_body", False):
                    count()  # whoever has the whole reply finds it counted
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            status = max(status, 500)
            raise
        finally:
            count()
