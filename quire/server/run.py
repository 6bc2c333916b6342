"""The life of a server process: bind, answer probes, load, serve, drain, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from quire.config.engine import EngineConfig
from quire.config.serve import ServeConfig
from quire.foundation.errors import ConfigError
from quire.foundation.heap import settle_heap
from quire.foundation.log import get_logger, setup
from quire.server.app import build_app, protect
from quire.server.auth import load_keys
from quire.server.banner import ready_lines
from quire.server.batch_queue import BatchQueue
from quire.server.limits import BoundedHttpProtocol
from quire.server.service import Service
from quire.types.pooling import PoolingParams
from quire.types.sampling import SamplingParams

if TYPE_CHECKING:
    from quire.frontend.async_engine import AsyncLLM

log = get_logger(__name__)

EXIT_OK, EXIT_ENGINE_DEAD = 0, 4
DEFAULT_QUEUE = 4096
WATCH_SECONDS = 1.0
ABORT_SECONDS = 2  # for aborted requests to say so and connections to close


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: when to stop is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(config: EngineConfig, serve: ServeConfig) -> int:
    """Serve until told to stop.

    Returns the exit code: 0 after a signal, 4 when the engine died. Raises ConfigError if it cannot start.
    """
    setup(config.observe.log_level)
    http_log = logging.getLogger("uvicorn")
    http_log.handlers, http_log.propagate = logging.getLogger("quire").handlers, False
    if config.schedule.max_num_queued_reqs is None:
        config = replace(config, schedule=replace(config.schedule, max_num_queued_reqs=DEFAULT_QUEUE))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(ServerProcess(config, serve).main())


class ServerProcess:
    def __init__(self, config: EngineConfig, serve: ServeConfig) -> None:
        self.service = Service(config, serve)
        self.serve = serve
        self.app = build_app(self.service)
        self.batches: BatchQueue = self.app.state.batches
        self.stop = asyncio.Event()  # asked to end
        self.abort = asyncio.Event()  # without waiting for anyone

    async def main(self) -> int:
        started = time.perf_counter()
        keys = load_keys(self.serve)
        listener = bind(self.serve)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        http = self._http(keys)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        starting = asyncio.create_task(self._start_engine(started, listener, bool(keys)))
        stopped = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait((starting, stopped, serving), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                await self._close(http, serving)
                # The thread that loads cannot be stopped, and leaving would wait for it. The engine's processes end
                # with this one.
                os._exit(EXIT_OK)
            starting.result()
            code = await self._watch()
            if code == EXIT_OK:
                await self._drain()
            return code
        finally:
            starting.cancel()
            stopped.cancel()
            await self._close(http, serving)

    async def _start_engine(self, started: float, listener: socket.socket, has_keys: bool) -> None:
        from quire.frontend.async_engine import AsyncLLM

        engine = await AsyncLLM.start(self.service.config, serving=True)
        try:
            before = time.perf_counter()
            await _warm_up(engine)
            now = time.perf_counter()
            settle_heap()
            self.service.attach(engine)
            self.batches.resume()
        except BaseException:
            engine.shutdown()
            raise
        print(
            *ready_lines(self.service, engine.info, listener, has_keys, now - before, now - started),
            sep="\n",
            flush=True,
        )

    def _on_signal(self, number: int) -> None:
        if self.stop.is_set() or number == signal.SIGINT:
            self.abort.set()
        self.service.draining = True
        self.stop.set()

    async def _watch(self) -> int:
        """Until told to stop (0) or the engine is dead (4)."""
        while True:
            try:
                await asyncio.wait_for(self.stop.wait(), WATCH_SECONDS)
                return EXIT_OK
            except TimeoutError:
                pass
            if problem := self.service.dead():
                log.error("%s; leaving with exit code %d", problem, EXIT_ENGINE_DEAD)
                return EXIT_ENGINE_DEAD

    async def _drain(self) -> None:
        """Let what runs finish: new requests are taken for the grace, then refused until the last one is done.

        Batches stop where they stand; the next server goes on with them.
        """
        await self.batches.stop()
        aborted = asyncio.create_task(self.abort.wait())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(aborted), self.serve.shutdown_grace)
        self.service.closed = True
        deadline = time.monotonic() + self.serve.shutdown_timeout
        while (tasks := self.service.in_flight.tasks) and not self.abort.is_set() and time.monotonic() < deadline:
            log.info("waiting for %d requests to finish", len(tasks))
            await asyncio.wait(
                {aborted, *tasks}, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
        aborted.cancel()

    async def _close(self, http: HttpServer, serving: asyncio.Task[None]) -> None:
        self.service.closed = self.service.draining = True
        await self.batches.stop()
        tasks = set(self.service.in_flight.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=ABORT_SECONDS)
        http.should_exit = True
        await asyncio.wait({serving}, timeout=ABORT_SECONDS + 1)
        if self.service.engine is not None:
            self.service.engine.shutdown()

    def _http(self, keys: list[str]) -> HttpServer:
        serve = self.serve
        config = uvicorn.Config(
            protect(self.app, self.service, keys),
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=serve.uvicorn_log_level,
            access_log=False,
            server_header=False,
            ssl_keyfile=serve.ssl_keyfile,
            ssl_certfile=serve.ssl_certfile,
            timeout_graceful_shutdown=ABORT_SECONDS,
        )
        return HttpServer(config)


async def _warm_up(engine: AsyncLLM) -> None:
    """The first token, or the first vector."""
    prompt = {"prompt_token_ids": [0]}
    if engine.info.resolved.pooler is not None:
        async for _ in engine.encode(prompt, PoolingParams(), "first-vector"):
            pass
        return
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    async for _ in engine.generate(prompt, params, "first-token"):
        pass


def bind(serve: ServeConfig) -> socket.socket:
    """A listening socket. Raises ConfigError naming the option if the address cannot be had."""
    for name in ("ssl_keyfile", "ssl_certfile"):
        file = getattr(serve, name)
        if file is not None and not os.access(file, os.R_OK):
            raise ConfigError(f"{name} {file!r} cannot be read", name)
    if bool(serve.ssl_keyfile) != bool(serve.ssl_certfile):
        raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile", "ssl_certfile")
    if serve.uds is not None:
        return _bind_unix(serve.uds)
    if not 0 <= serve.port <= 65535:
        raise ConfigError(f"port must be in [0, 65535], got {serve.port}", "port")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            serve.host, serve.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError(f"cannot listen on {serve.host}:{serve.port}: {reason}", "port") from None
    listener.listen(2048)
    return listener


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
                probe.connect(path)
                raise ConfigError(f"another server listens on {path}", "uds")
            Path(path).unlink()  # left behind by a server that was killed
        listener.bind(path)
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error}", "uds") from None
    listener.listen(2048)
    return listener


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
