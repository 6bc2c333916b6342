"""HTTP/1.1 to a server, as thin as it goes: connections that are kept, bytes that nobody looks into."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import cast

import httptools

_MOST_BYTES = 256 * 1024  # of a body that wait for a slow client before its server is asked to pause
_KEPT = 1024  # idle connections to a server
# A machine that is gone closes nothing: the kernel asks it, and gives the connection up after some seconds.
_WATCH = (
    (socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3), (socket.TCP_USER_TIMEOUT, 5000),
)  # fmt: skip
_UNREACHABLE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


class UpstreamError(Exception):
    """The server is not there, or has gone before its answer was complete.

    was_kept: it closed a connection that was kept open, which says nothing of it. is_refusal: it takes none, or its
    machine is gone.
    """

    def __init__(self, message: str, *, was_kept: bool = False, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.was_kept = was_kept
        self.is_refusal = is_refusal


@dataclass(slots=True)
class Head:
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """One exchange after the other."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._num_exchanges = 0
        self._lost = self._is_unreachable = False
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._head = Head()
        self._has_head = self._is_complete = self._is_paused = self._has_length = False
        self._chunks: deque[bytes] = deque()
        self._num_bytes = 0
        self._keeps = self._is_bodyless = False

    # -- of asyncio ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _WATCH:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.close()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._is_unreachable = isinstance(error, OSError) and error.errno in _UNREACHABLE
        if self._has_head and not self._has_length:
            self._is_complete = True  # its end is the answer's
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- of the parser -------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        self._head.headers.append((lowered, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # "100 Continue": the answer is yet to come
            self._head = Head()
            return
        self._head.status = status
        self._has_head = True
        self._has_length = self._has_length or status in (204, 304)
        self._keeps = self._parser.should_keep_alive()
        self._is_complete = self._is_bodyless

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._num_bytes += len(body)
        if self._num_bytes > _MOST_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head

    # -- an exchange ---------------------------------------------------------------------------------------------

    async def ask(self, request: bytes, body: bytes, *, is_head: bool = False) -> Head:
        """Send a request and wait for the first of its answer's body, or its end: until then all can be asked again.

        is_head: its answer has none.

        Raises UpstreamError.
        """
        self._reset()
        self._is_bodyless = is_head
        was_kept, self._num_exchanges = self._num_exchanges > 0, self._num_exchanges + 1
        assert self._transport is not None
        if not self._lost:
            self._transport.writelines((request, body) if body else (request,))  # one call of the kernel
        while not (self._chunks or self._is_complete):
            if self._is_unreachable:
                raise UpstreamError("its machine does not answer", is_refusal=True)
            if self._lost:
                raise UpstreamError("it closed the connection", was_kept=was_kept and not self._has_head)
            await self._news()
        return self._head

    async def read(self) -> bytes:
        """Some more of the body; empty at its end. Raises UpstreamError."""
        while not self._chunks:
            if self._is_complete:
                return b""
            if self._lost:
                raise UpstreamError("it closed the connection amid its answer")
            await self._news()
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._num_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return body

    @property
    def is_at_end(self) -> bool:
        """Whether all that there is has been read."""
        return self._is_complete and not self._chunks

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    @property
    def is_usable(self) -> bool:
        """For another exchange."""
        return not self._lost and self._is_complete and self._keeps and not self._chunks

    @property
    def is_lost(self) -> bool:
        return self._lost

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Pool:
    """Connections to one address."""

    def __init__(self, host: str, port: int, connect_timeout: float) -> None:
        self._host, self._port, self._timeout = host, port, connect_timeout
        self._idle: list[Connection] = []

    async def take(self, *, fresh: bool = False) -> Connection:
        """A connection, the one used last if one is idle and `fresh` does not forbid. Raises UpstreamError."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.is_lost:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                return (await loop.create_connection(Connection, self._host, self._port))[1]
        except (OSError, TimeoutError) as error:
            raise UpstreamError(
                f"it takes no connection: {str(error) or type(error).__name__}", is_refusal=True
            ) from None

    def give_back(self, connection: Connection) -> None:
        if connection.is_usable and len(self._idle) < _KEPT:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
