"""The router's process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.config.route import RouteConfig
from quire.foundation.errors import ConfigError
from quire.foundation.heap import settle_heap
from quire.foundation.http10 import unchunked_for_old
from quire.foundation.log import get_logger, setup
from quire.router.app import RouterApp

log = get_logger(__name__)


def run_router(config: RouteConfig) -> int:
    """Route until told to stop. Returns the exit code. Raises ConfigError."""
    setup(config.log_level)
    logging.getLogger("uvicorn").handlers = logging.getLogger("quire").handlers
    try:
        import uvloop

        factory = uvloop.Loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_serve(config))


def _bind(config: RouteConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"port: {config.host}:{config.port} cannot be bound: {error}", "port") from None
    listener.listen(4096)
    return listener


async def _serve(config: RouteConfig) -> int:
    app = RouterApp(config)
    listener = _bind(config)
    server = _Server(
        uvicorn.Config(
            app,
            http=_Protocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(config.shutdown_timeout)),
        )
    )
    loop = asyncio.get_running_loop()

    def stop() -> None:
        app.is_draining = True
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    looking = asyncio.create_task(app.fleet.run())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = listener.getsockname()[:2]
    print(f"Ready: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    settle_heap()
    try:
        await asyncio.wait({looking, serving}, return_when=asyncio.FIRST_COMPLETED)
        if looking.done():
            looking.result()
        await serving
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
    return 0


class _Protocol(HttpToolsProtocol):
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, unchunked_for_old(app, cycle))


class _Server(uvicorn.Server):
    """Signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield
