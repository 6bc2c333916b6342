"""The life of a server: bind, answer probes, load, serve, drain, exit code. Here of one that is a single process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

from quire.config.engine import EngineConfig
from quire.config.schedule import SchedulerConfig
from quire.config.serve import ServeConfig
from quire.foundation.errors import ConfigError
from quire.foundation.log import get_logger
from quire.foundation.started import process_age
from quire.observe.profiling import StartClock
from quire.server.app import build_app, protect
from quire.server.batches.store import BatchStore
from quire.server.http.auth import load_keys
from quire.server.http.listener import bind
from quire.server.http.protocol import HttpConfig
from quire.server.http.server import HttpServer
from quire.server.processes.banner import tell_ready
from quire.server.processes.record import record
from quire.server.processes.serving import Serving, loop_factory, setup_logs
from quire.server.processes.supervisor import EXIT_ENGINE_DEAD, EXIT_OK, MAX_FRONT_ENDS, Supervisor
from quire.server.service import Service
from quire.server.tracing import check

log = get_logger(__name__)

DEFAULT_QUEUE = 4096
DEFAULT_QUEUE_SECONDS = 30.0
WATCH_SECONDS = 1.0


def run_server(config: EngineConfig, serve: ServeConfig) -> int:
    """Serve until told to stop.

    Returns the exit code: 0 after a signal, 4 when the engine died. Raises ConfigError if it cannot start, QuireError
    if its front ends keep dying.
    """
    count = serve.api_server_count
    if not 1 <= count <= MAX_FRONT_ENDS:
        raise ConfigError(f"api_server_count must be in [1, {MAX_FRONT_ENDS}], got {count}", "api_server_count")
    serve.check_adapters(config)
    check(serve.otlp_traces_endpoint)
    if serve.batch_dir is not None:  # told before a model is loaded
        BatchStore(Path(serve.batch_dir).expanduser()).close()
    setup_logs(config.observe.log_level)
    config = replace(config, schedule=_with_limits(config.schedule))
    ctrl_c = signal.getsignal(signal.SIGINT)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run((ServerProcess if count == 1 else Supervisor)(config, serve).main())
    finally:
        signal.signal(signal.SIGINT, ctrl_c)  # uvloop leaves a handler of its own behind


def _with_limits(schedule: SchedulerConfig) -> SchedulerConfig:
    """A server's own where none are given."""
    length, seconds = schedule.max_num_queued_reqs, schedule.max_queue_seconds
    return replace(
        schedule,
        max_num_queued_reqs=DEFAULT_QUEUE if length is None else length,
        max_queue_seconds=DEFAULT_QUEUE_SECONDS if seconds is None else seconds,
    )


class ServerProcess:
    def __init__(self, config: EngineConfig, serve: ServeConfig) -> None:
        self.service = Service(config, serve)
        self.serve = serve
        self.app = build_app(self.service)
        self.serving = Serving(self.service, self.app)

    async def main(self) -> int:
        start = StartClock()
        keys = load_keys(self.serve)
        listener = bind(self.serve)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGUSR1, self._ask_for_record)
        http = HttpServer(HttpConfig(protect(self.app, self.service, keys), self.serve))
        http_task = self.serving.start(http, listener)
        starting = asyncio.create_task(self._start_engine(start, listener, bool(keys)))
        stopped = asyncio.create_task(self.serving.stop.wait())
        try:
            await asyncio.wait((starting, stopped, http_task), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                await self.serving.close()
                # The thread that loads cannot be stopped, and leaving would wait for it. The engine's processes end
                # with this one.
                os._exit(EXIT_OK)
            starting.result()
            code = await self._watch()
            if code == EXIT_OK:
                await self.serving.drain()
            return code
        finally:
            starting.cancel()
            stopped.cancel()
            await self.serving.close()

    async def _start_engine(self, start: StartClock, listener: socket.socket, has_keys: bool) -> None:
        from quire.frontend.async_engine import AsyncLLM

        start.lap("server")
        engine = await AsyncLLM.start(self.service.config, serving=True, clock=start)
        await self.serving.attach(engine)
        start.lap("first token")
        self.serving.batches.resume()
        tell_ready(self.service, engine.info, listener, has_keys, start.seconds, process_age())

    def _ask_for_record(self) -> None:
        engine = self.service.engine
        if engine is not None:
            requests = {"http": [trail.line() for trail in self.service.trails]}
            self._recording = asyncio.create_task(record(engine.call, self.service.config, requests))

    def _on_signal(self, number: int) -> None:
        log.info("%s came", signal.Signals(number).name)
        self.serving.ask_to_stop(at_once=number == signal.SIGINT)

    async def _watch(self) -> int:
        """Until told to stop (0) or the engine is dead (4)."""
        while True:
            try:
                await asyncio.wait_for(self.serving.stop.wait(), WATCH_SECONDS)
                return EXIT_OK
            except TimeoutError:
                pass
            if problem := self.service.dead():
                log.error("%s; leaving with exit code %d", problem, EXIT_ENGINE_DEAD)
                return EXIT_ENGINE_DEAD
