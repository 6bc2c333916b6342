"""The HTTP side of a process from its first probe to its last stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from typing import TYPE_CHECKING

from fastapi import FastAPI

from quire.foundation.errors import EngineDeadError
from quire.foundation.heap import settle_heap
from quire.foundation.log import get_logger, setup
from quire.foundation.threads import switch_soon
from quire.server.adapters import load_modules
from quire.server.batches.queue import BatchQueue
from quire.server.http.protocol import ABORT_SECONDS
from quire.server.http.server import HttpServer
from quire.server.processes.pulse import Pulse, beat_seconds
from quire.server.service import Service
from quire.types.pooling import PoolingParams
from quire.types.sampling import SamplingParams

if TYPE_CHECKING:
    from quire.frontend.async_engine import AsyncLLM

log = get_logger(__name__)


class Serving:
    """An app that serves, is told to stop, lets what runs finish, and closes."""

    def __init__(self, service: Service, app: FastAPI) -> None:
        self.service = service
        self.batches: BatchQueue = app.state.batches
        self.stop = asyncio.Event()  # asked to end
        self.abort = asyncio.Event()  # without waiting for anyone
        seconds = beat_seconds(service.serve.hang_timeout, service.serve.ping_interval)
        self._pulse = Pulse(service.counters, seconds, service.look_after_engine, service.hung)

    def start(self, http: HttpServer, listener: socket.socket) -> asyncio.Task[None]:
        """Answer from now on; the task ends when the server does."""
        self._http = http
        self._pulse.start()
        self._task = asyncio.create_task(http.serve(sockets=[listener]))
        return self._task

    async def attach(self, engine: AsyncLLM) -> None:
        """Serve with this engine, once it has made its first token."""
        try:
            await load_modules(engine, self.service.serve)
            await _warm_up(engine, f"first-{self.service.counters.number}")
            settle_heap()
            switch_soon()
            self.service.attach(engine)
        except BaseException:
            engine.shutdown()
            raise

    def ask_to_stop(self, *, at_once: bool) -> None:
        """The second time is `at_once`."""
        if at_once or self.stop.is_set():
            self.abort.set()
        self.service.draining = True
        self.stop.set()

    async def drain(self) -> None:
        """Let what runs finish: new requests are taken for the grace, then refused until the last one is done.

        Batches stop where they stand; the next server goes on with them.
        """
        grace, limit = self.service.serve.shutdown_grace, self.service.serve.shutdown_timeout
        who = f"front end {self.service.counters.number} " if len(self.service.counters.pages) > 1 else ""
        began = time.monotonic()
        running = len(self.service.in_flight.tasks)
        log.info("%sdrain begins: %d requests run (grace %g s, limit %g s)", who, running, grace, limit)
        await self.batches.stop()
        aborted = asyncio.create_task(self.abort.wait())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(aborted), grace)
        self.service.closed = True
        deadline = time.monotonic() + limit
        while (tasks := self.service.in_flight.tasks) and not self.abort.is_set() and time.monotonic() < deadline:
            await asyncio.wait(
                {aborted, *tasks}, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
        if tasks:
            reason = "told to stop at once" if self.abort.is_set() else f"the limit of {limit:g} s is over"
            log.warning("%sdrain: %s, %d requests are aborted", who, reason, len(tasks))
        log.info("%sdrain ends after %.1f s", who, time.monotonic() - began)
        aborted.cancel()

    async def close(self) -> None:
        """Abort what still runs, and end the server and the engine."""
        self.service.closed = self.service.draining = True
        self._pulse.stop()
        await self.batches.stop()
        tasks = set(self.service.in_flight.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=ABORT_SECONDS)
        self._http.should_exit = True
        await asyncio.wait({self._task}, timeout=ABORT_SECONDS + 1)
        if self.service.engine is not None:
            self.service.engine.shutdown()
        if self.service.tracing is not None:
            await asyncio.to_thread(self.service.tracing.close)


async def _warm_up(engine: AsyncLLM, request_id: str) -> None:
    """The first token, or the first vector."""
    prompt = {"prompt_token_ids": [0]}
    if engine.info.resolved.pooler is not None:
        async for _ in engine.encode(prompt, PoolingParams(), request_id):
            pass
        return
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    async for output in engine.generate(prompt, params, request_id):
        if output.error is not None:
            raise EngineDeadError(output.error)


def setup_logs(level: str) -> None:
    """Ours, and uvicorn's like ours."""
    setup(level)
    http_log = logging.getLogger("uvicorn")
    http_log.handlers, http_log.propagate = logging.getLogger("quire").handlers, False


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
