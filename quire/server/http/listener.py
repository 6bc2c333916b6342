"""The address of a server: a listening socket, and how several processes share it.

All processes inherit one socket. Each accepts one connection a turn of its event loop, and one that has more
connections than another steps back for a moment. So streams, which may last for minutes, spread by number. With a
socket each (SO_REUSEPORT) the kernel would draw lots: of 8 streams on 2 processes 6 or more fall on one in three cases
of ten; connections that wait for a process which dies would die with it; and a second server on the same port would not
be told that it is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from quire.config.serve import ServeConfig
from quire.foundation.errors import ConfigError
from quire.foundation.log import get_logger
from quire.server.http.protocol import BoundedHttpProtocol
from quire.server.processes.shared_counters import CONNECTIONS, SharedCounters

BACKLOG = 2048
STEP_BACK_SECONDS = 0.005  # for a process with fewer connections to come first
FULL_SECONDS = 1.0  # before another try after the system had no room for a connection
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
log = get_logger(__name__)


def bind(serve: ServeConfig) -> socket.socket:
    """A listening socket. Raises ConfigError naming the option if the address or TLS cannot be had."""
    _check_tls(serve.ssl_certfile, serve.ssl_keyfile)
    if serve.uds is not None:
        return bind_unix(serve.uds)
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
    listener.listen(BACKLOG)
    if serve.send_timeout > 0 and hasattr(socket, "TCP_USER_TIMEOUT"):
        # Connections inherit it: what the system holds back for a client that takes nothing, or is gone, ends as well.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(serve.send_timeout * 1000))
    return listener


def _check_tls(certificate: str | None, key: str | None) -> None:
    for name, file in (("ssl_keyfile", key), ("ssl_certfile", certificate)):
        if file is not None and not os.access(file, os.R_OK):
            raise ConfigError(f"{name} {file!r} cannot be read", name)
    if not certificate or not key:
        if certificate or key:
            raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile", "ssl_certfile")
        return

    def password() -> str:  # or OpenSSL asks for one on the terminal
        raise ConfigError(f"ssl_keyfile {key!r} is encrypted; give a key without a password", "ssl_keyfile")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password)
    except OSError as error:  # ssl.SSLError among them
        reason = getattr(error, "reason", None) or error.strerror
        if reason == "KEY_VALUES_MISMATCH":
            reason = "they do not go together"
        raise ConfigError(
            f"ssl_certfile {certificate!r} and ssl_keyfile {key!r} cannot be used: {reason}", "ssl_certfile"
        ) from None


def bind_unix(path: str) -> socket.socket:
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
    listener.listen(BACKLOG)
    return listener


class SharedHttpProtocol(BoundedHttpProtocol):
    """Tells when its connection is gone."""

    on_lost: Callable[[], None]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.on_lost()


class Acceptor:
    """Takes connections from a listening socket that other processes accept from too."""

    def __init__(
        self,
        listener: socket.socket,
        counters: SharedCounters,
        make_protocol: Callable[[], SharedHttpProtocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._counters = counters
        self._make_protocol = make_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._greeting: set[asyncio.Task[None]] = set()  # connections whose handshake is not over
        listener.setblocking(False)
        counters.mine[CONNECTIONS] = 0
        self._listen()

    def close(self) -> None:
        """Leave the socket to the others."""
        self._counters.mine[CONNECTIONS] = float("inf")
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        for task in self._greeting:
            task.cancel()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._on_connection)

    def _on_connection(self) -> None:
        if self._counters.mine[CONNECTIONS] > min(page[CONNECTIONS] for page in self._counters.pages):
            self._rest(STEP_BACK_SECONDS, self._accept_anyway)
        else:
            self._accept()

    def _accept_anyway(self) -> None:
        """Whoever should have come first is busy."""
        self._listen()
        self._accept()

    def _rest(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, then)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was quicker
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            log.error("no room for a connection: %s", error.strerror)
            self._rest(FULL_SECONDS, self._listen)
            return
        self._counters.mine[CONNECTIONS] += 1
        task = self._loop.create_task(self._greet(connection))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        protocol = self._make_protocol()
        protocol.on_lost = self._lost
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
        except (OSError, ssl.SSLError, asyncio.CancelledError):  # it left at once, or does not speak TLS
            connection.close()
            self._lost()

    def _lost(self) -> None:
        self._counters.mine[CONNECTIONS] -= 1
