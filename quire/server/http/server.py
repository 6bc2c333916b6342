"""uvicorn as we run it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from quire.server.http.listener import Acceptor, SharedHttpProtocol
from quire.server.processes.shared_counters import SharedCounters


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: when to stop is decided elsewhere.

    shared: a listening socket from which other processes accept too, and where they count their connections. With
    `waits` nothing is accepted there until `accept` is called.
    """

    def __init__(
        self, config: uvicorn.Config, shared: tuple[socket.socket, SharedCounters] | None = None, *, waits: bool = False
    ) -> None:
        super().__init__(config)
        self._shared = shared
        self._waits = waits
        self._acceptor: Acceptor | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self._waits:
            self.accept()

    def accept(self) -> None:
        """Take connections from the shared socket, if there is one, from now on."""
        if self._shared is not None and self._acceptor is None and not self.should_exit:
            self._acceptor = Acceptor(*self._shared, self._make_protocol, self.config.ssl)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)

    def _make_protocol(self) -> SharedHttpProtocol:
        return SharedHttpProtocol(self.config, self.server_state, self.lifespan.state)
