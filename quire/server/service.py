"""What the endpoints share: the engine, who may be served, and whether the process is fit to serve."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from quire.config.engine import EngineConfig
from quire.config.serve import ServeConfig
from quire.foundation.errors import InputError
from quire.foundation.shown import clipped
from quire.frontend.templates.chat import ChatTemplate
from quire.frontend.templates.sandbox import TemplateSandbox
from quire.frontend.tokenization.encoder import TextEncoder
from quire.server.adapters import find_in_folder
from quire.server.dashboard.history import History
from quire.server.door import Door
from quire.server.http.errors import ApiError
from quire.server.http.limits import OpenAnswers
from quire.server.http.long_body import Greeting, LongBodies
from quire.server.http.metrics import HttpMetrics
from quire.server.http.trail import Trails
from quire.server.metrics import Metrics
from quire.server.processes.pulse import Pings
from quire.server.processes.shared_counters import SharedCounters
from quire.server.tracing import Tracing
from quire.types.adapter import LoRARequest
from quire.types.output import EngineStats

if TYPE_CHECKING:
    from quire.frontend.async_engine import AsyncLLM
    from quire.frontend.tokenization.tokenizer import Tokenizer


class Progress:
    """How long requests have waited for an engine that gives no sign of life.

    Only time in which somebody waits for the engine counts: not an idle hour, not a client that reads slowly.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self._last = 0.0

    def wait(self) -> None:
        """A request begins to wait for its next output."""
        if self.num_waiting == 0:
            self.seen()
        self.num_waiting += 1

    def done(self) -> None:
        """It waits no longer: the output came, or nobody wants it any more."""
        self.num_waiting -= 1

    def seen(self) -> None:
        """The engine did something."""
        self._last = time.monotonic()

    def stalled_for(self) -> float:
        """Seconds; 0 if nobody waits."""
        return time.monotonic() - self._last if self.num_waiting else 0.0


class Service:
    """One a process. It exists before the engine does: probes are answered while the model loads.

    created: Unix seconds, the same in all processes of a server; board: where these count.
    """

    def __init__(
        self,
        config: EngineConfig,
        serve: ServeConfig,
        created: int | None = None,
        counters: SharedCounters | None = None,
    ) -> None:
        self.config = config
        self.serve = serve
        self.counters = SharedCounters() if counters is None else counters
        self.names = config.model.names
        self.created = int(time.time()) if created is None else created
        self.engine: AsyncLLM | None = None
        self.metrics: Metrics | None = None
        self.history: History | None = None
        self.http_metrics: HttpMetrics | None = None  # of an app that is shown to the world
        self.door: Door | None = None
        self.in_flight = OpenAnswers(self.counters, serve.keepalive_interval)
        self.templates = TemplateSandbox()
        self.trails = Trails()
        self.tracing: Tracing | None = None
        self._encoder: TextEncoder | None = None
        self.long_bodies: LongBodies | None = None
        self.draining = False  # /readyz says so; requests are still taken during the grace
        self.closed = False  # new requests are refused
        self.progress = Progress()
        self.pings = Pings(serve.ping_interval)
        self._last_step = 0.0

    def attach(self, engine: AsyncLLM) -> None:
        """The engine is up and has made its first token."""
        self.metrics = Metrics(self.names[0], engine.info, self.counters)
        self.history = History(self.metrics)
        if self.serve.otlp_traces_endpoint is not None:
            self.tracing = Tracing(self.serve.otlp_traces_endpoint, self.names[0])
        schedule = self.config.schedule
        self.door = Door(schedule.max_queue_seconds or 0.0, self.metrics, max_queued=schedule.max_num_queued_reqs)
        self.door.outage = lambda: engine.outage
        self.metrics.wait = self.door.wait
        self.engine = engine
        self.long_bodies = LongBodies(self._greeting)
        engine.on_stats = self.on_stats
        engine.on_replay = self.metrics.replay

    def _greeting(self) -> bytes:
        """To the process that reads long bodies: all that it must know, and no secrets."""
        engine = self.running()
        tokenizer, template = engine.get_tokenizer(), engine.chat_template
        if isinstance(template, str):
            template = ChatTemplate(template)
        return Greeting(
            engine.info,
            dataclasses.replace(self.serve, api_key=[], api_key_file=None),
            None if tokenizer is None else str(tokenizer.folder),
            None if template is None else (template.sources, template.special_tokens),
        ).message()

    def on_stats(self, stats: EngineStats) -> None:
        """A report of the core, a few a second while it works and one when it falls idle."""
        if stats.last_step_time != self._last_step:
            self._last_step = stats.last_step_time
            self.progress.seen()
        if self.metrics is not None:
            self.metrics.steps(stats)
        if self.history is not None:
            self.history.note(stats)
        if self.door is not None and stats.queue is not None:
            self.door.report(stats.queue)

    def running(self) -> AsyncLLM:
        """The engine, if a request may use it now. Raises ApiError 503."""
        problem = self.dead() or ("the server is shutting down" if self.closed else None)
        if self.engine is None:
            problem = "the model is still loading"
        if problem or self.engine is None:
            raise ApiError(503, problem or "")
        return self.engine

    def tokenizer(self) -> Tokenizer:
        """Raises InputError if the server works on token ids only."""
        tokenizer = self.running().get_tokenizer()
        if tokenizer is None:
            raise InputError("this server works on token ids only (skip_tokenizer_init): send a list of ids", "prompt")
        return tokenizer

    @property
    def encoder(self) -> TextEncoder:
        """Raises InputError if the server works on token ids only."""
        if self._encoder is None:
            self._encoder = TextEncoder(self.tokenizer(), self.running().info.max_model_len)
        return self._encoder

    def use_encoder(self, encoder: TextEncoder) -> None:
        """Before one was needed."""
        self._encoder = encoder

    def check_model(self, name: str | None) -> str:
        """The model's name for the reply. Raises ApiError 404 for a name that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names and self.adapter_of(name) is None:
            raise ApiError(
                404,
                f"The model `{clipped(name, 128)}` does not exist. Served: {clipped(', '.join(self.all_names), 512)}.",
                "model",
            )
        return name

    @property
    def all_names(self) -> list[str]:
        """The base model's, and the loaded adapters'."""
        adapters = [] if self.engine is None else [adapter.lora_name for adapter in self.engine.adapters]
        return [*self.names, *adapters]

    def adapter_of(self, name: str) -> LoRARequest | None:
        """The adapter that is served under a model's name; None: it is the base model's, or nobody's."""
        if self.engine is None or name in self.names:
            return None
        known = self.engine.adapters.named(name)
        return find_in_folder(self.engine, self.serve, name) if known is None else known[0]

    def check_generates(self) -> None:
        """Raises InputError if the model makes vectors."""
        pooler = self.running().info.resolved.pooler
        if pooler is not None:
            raise InputError(
                f"the model {self.names[0]!r} runs for pooling ({', '.join(pooler.tasks)}) and does not generate; "
                "start a model that can with --runner generate",
                "model",
            )

    def dead(self) -> str | None:
        if self.engine is not None and self.engine.errored:
            return f"the engine has stopped: {self.engine.dead_error}"
        return None

    def outage(self) -> str | None:
        """Said while an engine that died is started again."""
        outage = None if self.engine is None else self.engine.outage
        return None if outage is None else str(outage)

    def hung(self) -> str | None:
        """Said when for `hang_timeout` seconds work is queued and no step has finished, or a ping has no answer."""
        if self.outage() is not None:
            self.progress.seen()
            return None
        stalled = self.progress.stalled_for()
        if stalled > self.serve.hang_timeout:
            return (
                f"the engine hangs: no step for {stalled:.0f} s "
                f"with {self.progress.num_waiting} requests waiting for it"
            )
        silent = 0.0 if self.engine is None or self.dead() else self.pings.unanswered_for(self.engine)
        if silent > self.serve.hang_timeout:
            return f"the engine hangs: it was asked for a sign of life {silent:.0f} s ago and gives none"
        return None

    def look_after_engine(self) -> None:
        """Ask a silent engine for a sign of life. Raises EngineDeadError."""
        if self.engine is not None:
            self.pings.look(self.engine)

    def unhealthy(self) -> str | None:
        """Why requests are not answered, if the engine is the reason: it loads, is dead, starts again or hangs."""
        if self.engine is None:
            return "the model is still loading"
        return self.dead() or self.outage() or self.hung()

    def not_ready(self) -> str | None:
        """Why a load balancer should send nothing here; None if it should."""
        return self.unhealthy() or ("the server is shutting down" if self.draining else None)
