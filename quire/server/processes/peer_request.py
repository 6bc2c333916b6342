"""One HTTP/1.1 request to another process of this server, over its Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httptools

Headers = list[tuple[bytes, bytes]]
# Of one connection, not of the request or the answer; and what each HTTP server adds by itself.
_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect", b"date"})
_READ_BYTES = 64 * 1024


class PeerGoneError(Exception):
    """It did not finish its answer."""


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: Headers


class PeerRequest:
    """`ask`, then `body`; `close` in any case, which aborts what is not finished. Raises OSError if nobody is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self._has_head = self._is_complete = False

    async def ask(self, method: bytes, target: bytes, headers: Headers, body: bytes | AsyncIterator[bytes]) -> Head:
        """Send a request, and wait for the head of the answer. Raises PeerGoneError if none comes.

        headers: of the request as it came; they tell how long a body is that comes in pieces.
        """
        self._reader, self._writer = await asyncio.open_unix_connection(self._path)
        lines = [b"%b %b HTTP/1.1" % (method, target), b"connection: close"]
        sent = [header for header in headers if header[0] not in _HOP_BY_HOP]
        is_chunked = (b"transfer-encoding", b"chunked") in headers and not isinstance(body, bytes)
        if is_chunked:
            sent.append((b"transfer-encoding", b"chunked"))
        elif isinstance(body, bytes):
            sent = [header for header in sent if header[0] != b"content-length"]
            sent.append((b"content-length", str(len(body)).encode()))
        lines += [b"%b: %b" % header for header in sent]
        self._writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # refused before it was sent: the answer says why
            async for piece in _once(body) if isinstance(body, bytes) else body:
                if piece:
                    self._writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
                    await self._writer.drain()
            if is_chunked:
                self._writer.write(b"0\r\n\r\n")
        while not self._has_head:
            await self._read()
        return Head(self._parser.get_status_code(), self._headers)

    async def body(self) -> AsyncIterator[bytes]:
        """The pieces of the answer as they come. Raises PeerGoneError if it breaks off."""
        while True:
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
            if self._is_complete:
                return
            await self._read()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def _read(self) -> None:
        try:
            data = await self._reader.read(_READ_BYTES)
            if data:
                self._parser.feed_data(data)
        except (ConnectionError, httptools.HttpParserError) as error:
            raise PeerGoneError(str(error)) from None
        if not data:
            raise PeerGoneError("the connection was closed")

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name not in _HOP_BY_HOP and name != b"x-request-id":
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._is_complete = True


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body
