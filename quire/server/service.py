"""What the endpoints share: the engine, who may be served, and whether the process is fit to serve."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quire.config.engine import EngineConfig
from quire.config.serve import ServeConfig
from quire.server.errors import ApiError
from quire.server.limits import InFlight
from quire.server.metrics import Metrics
from quire.types.output import EngineStats

if TYPE_CHECKING:
    from quire.frontend.async_engine import AsyncLLM

DEMO_NAME = "quire-demo"


class Service:
    """One a process. It exists before the engine does: probes are answered while the model loads."""

    def __init__(self, config: EngineConfig, serve: ServeConfig) -> None:
        self.config = config
        self.serve = serve
        self.names = config.model.served_model_name or [config.model.model or DEMO_NAME]
        self.created = int(time.time())
        self.engine: AsyncLLM | None = None
        self.metrics: Metrics | None = None
        self.in_flight = InFlight()
        self.draining = False  # /readyz says so; requests are still taken during the grace
        self.closed = False  # new requests are refused
        self._progress = time.monotonic()
        self._last_step = 0.0
        self._seen_steps = 0

    def attach(self, engine: AsyncLLM) -> None:
        """The engine is up and has made its first token."""
        self.metrics = Metrics(self.names[0], engine.info.max_model_len)
        self.engine = engine

    def running(self) -> AsyncLLM:
        """The engine, if a request may use it now. Raises ApiError 503."""
        problem = self.dead() or ("the server is shutting down" if self.closed else None)
        if self.engine is None:
            problem = "the model is still loading"
        if problem or self.engine is None:
            raise ApiError(503, problem or "")
        return self.engine

    def check_model(self, name: str | None) -> str:
        """The model's name for the reply. Raises ApiError 404 for a name that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ApiError(404, f"The model `{name}` does not exist. Served: {', '.join(self.names)}.", "model")
        return name

    def dead(self) -> str | None:
        if self.engine is not None and self.engine.errored:
            return f"the engine has stopped: {self.engine.dead_error}"
        return None

    async def stats(self) -> EngineStats:
        """Counters of the core as of its last report."""
        if self.engine is None:
            return EngineStats()
        stats = self.engine.stats()
        if self.metrics is not None and stats.num_steps != self._seen_steps:
            self._seen_steps = stats.num_steps
            self.metrics.steps(stats.step_tokens)
        return stats

    def watch(self, stats: EngineStats) -> None:
        """Note progress: a step has finished, or there is nothing to do. Called about once a second."""
        if self.in_flight.num_answers == 0 or stats.last_step_time != self._last_step:
            self._progress = time.monotonic()
            self._last_step = stats.last_step_time

    def hung(self) -> str | None:
        """Said when work is queued and no step has finished for `hang_timeout` seconds."""
        idle = time.monotonic() - self._progress
        if self.in_flight.num_answers and idle > self.serve.hang_timeout:
            return f"the engine hangs: no step for {idle:.0f} s with {self.in_flight.num_answers} answers queued"
        return None

    def not_ready(self) -> str | None:
        """Why a load balancer should send nothing here; None if it should."""
        if self.engine is None:
            return "the model is still loading"
        return self.dead() or ("the server is shutting down" if self.draining else None) or self.hung()
