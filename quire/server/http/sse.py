"""Replies that are made while they are sent: server-sent events, and JSON that takes a while."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.foundation.json_parts import json_parts
from quire.foundation.log import get_logger
from quire.server.http.errors import ApiError, error_body, explain
from quire.server.http.limits import OpenAnswers
from quire.server.http.trail import trail_of

log = get_logger(__name__)

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"  # a comment: clients skip it
PART = 64 * 1024  # bytes of a long reply that are sent at a time
TEXT = "\0text\0"  # stands for the text in a chunk that others are like
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks reverse proxies to pass every event on at once
]


class ChunkWriter:
    """Server-sent events of one request. All that its chunks share is serialised once."""

    def __init__(self, shared: dict[str, Any], *, include_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(shared)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(
        self, choice: dict[str, Any], usage: dict[str, Any] | None = None, beside: dict[str, Any] | None = None
    ) -> bytes:
        """beside: further fields of the chunk itself."""
        tail = self._tail if usage is None else b'],"usage":' + orjson.dumps(usage) + b"}\n\n"
        if beside:
            tail = b"]," + orjson.dumps(beside)[1:-1] + tail[1:]
        return self._head + orjson.dumps(choice) + tail

    def around(self, choice: dict[str, Any]) -> list[bytes]:
        """What stands around the text in chunks like this one, whose text is TEXT (once or more)."""
        return self.chunk(choice).split(orjson.dumps(TEXT))

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk: no choices, the sums of the whole request."""
        return self._head + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"


class LiveReply(Response, ABC):
    """Runs `produce(send)` and cancels it when the client goes away, so that what it waits for is aborted.

    It counts as `answers` answers in flight while it runs. Exceptions before the first byte become an ordinary error
    reply (the app's handlers); `produce` must handle those that come later.
    """

    def __init__(self, in_flight: OpenAnswers, answers: int) -> None:
        self.in_flight = in_flight
        self.answers = answers
        self.background = None
        self.started = False

    @abstractmethod
    async def produce(self, send: Send) -> None: ...

    async def interrupted(self, send: Send, error: Exception) -> None:
        """The reply has begun and cannot be finished. By default the HTTP server closes the connection unfinished."""

    async def _interrupt(self, send: Send, error: Exception) -> None:
        self._trail.fail(explain(error)[1])
        await self.interrupted(send, error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._trail = trail_of(scope)
        work = asyncio.create_task(self.produce(send))
        gone = asyncio.create_task(_client_gone(receive))
        self.in_flight.tasks.add(work)
        self.in_flight.num_answers += self.answers
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))
            elif work.cancelled():
                stopped = ApiError(503, "the server is shutting down")
                if not self.started:
                    raise stopped
                await self._interrupt(send, stopped)
            else:
                work.result()
        finally:
            self.in_flight.tasks.discard(work)
            self.in_flight.num_answers -= self.answers
            gone.cancel()
            work.cancel()


def event(fields: dict[str, Any]) -> bytes:
    """A server-sent event that is named after its type."""
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), orjson.dumps(fields))


def broken_off(error: Exception) -> bytes:
    """The end of a stream of chunks that cannot go on."""
    return b"data: " + error_body(*explain(error)) + b"\n\n" + DONE


class EventStream(LiveReply):
    """Sends frames as they come. The status line waits for the first frame: a refusal still has a status of its own,
    unless it takes longer than the silence that is allowed.

    `end` closes a stream that is complete, `failed` one that is not, `alive` fills a silence.
    """

    def __init__(
        self,
        in_flight: OpenAnswers,
        answers: int,
        frames: Callable[[], AsyncGenerator[bytes, None]],
        *,
        end: bytes = DONE,
        failed: Callable[[Exception], bytes] = broken_off,
        alive: bytes = KEEPALIVE,
    ) -> None:
        super().__init__(in_flight, answers)
        self.frames = frames
        self.end = end
        self.failed = failed
        self.alive = alive
        self._last = 0.0  # when something was sent
        self._beginning = asyncio.Lock()

    async def produce(self, send: Send) -> None:
        try:
            async with self._kept_alive(send), aclosing(self.frames()) as frames:
                async for frame in frames:
                    if not self.started:
                        await self._begin(send)
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                    self._last = time.monotonic()
        except Exception as error:
            if not self.started:
                raise
            if explain(error)[0] == 500:
                log.exception("a stream broke off")
            await self._interrupt(send, error)
        else:
            if not self.started:
                await self._begin(send)
            await send({"type": "http.response.body", "body": self.end})

    @asynccontextmanager
    async def _kept_alive(self, send: Send) -> AsyncIterator[None]:
        self._last = time.monotonic()
        if self.in_flight.keepalive_interval <= 0:
            yield
            return
        keeper = asyncio.create_task(self._keep_alive(send, self.in_flight.keepalive_interval))
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.wait((keeper,))

    async def _keep_alive(self, send: Send, interval: float) -> None:
        while True:
            silence = time.monotonic() - self._last
            if silence >= interval:
                if not self.started:
                    await self._begin(send)
                await send({"type": "http.response.body", "body": self.alive, "more_body": True})
                self._last = time.monotonic()
            else:
                await asyncio.sleep(interval - silence)

    async def _begin(self, send: Send) -> None:
        """Once, whether a frame or a sign of life comes first."""
        async with self._beginning:
            if not self.started:
                await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
                self.started = True

    async def interrupted(self, send: Send, error: Exception) -> None:
        await send({"type": "http.response.body", "body": self.failed(error)})


class LongReply(Response):
    """JSON that is there already, sent in parts: a client that reads slowly is waited for, and no part is long."""

    def __init__(self, parts: bytes | memoryview | list[bytes]) -> None:
        self._parts: Sequence[bytes | memoryview] = parts if isinstance(parts, list) else [parts]
        length = str(sum(map(len, self._parts)))
        super().__init__(None, headers={"content-length": length}, media_type="application/json")

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_parts(send, self._parts)


async def send_parts(send: Send, parts: Sequence[bytes | memoryview]) -> None:
    """A whole body, some of it at a time."""
    pending = bytearray()
    for number, part in enumerate(parts, 1):
        if not pending and number == len(parts) and len(part) <= PART:
            await send({"type": "http.response.body", "body": bytes(part)})
            return
        for start in range(0, len(part), PART):
            pending += part[start : start + PART]
            if len(pending) >= PART:
                await send({"type": "http.response.body", "body": bytes(pending), "more_body": True})
                pending.clear()
    await send({"type": "http.response.body", "body": bytes(pending)})


class JsonReply(LiveReply):
    """Sends one JSON object once it is made."""

    def __init__(
        self,
        in_flight: OpenAnswers,
        answers: int,
        make: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        super().__init__(in_flight, answers)
        self.make = make

    async def produce(self, send: Send) -> None:
        parts = await json_parts(await self.make())
        self.started = True
        length = str(sum(map(len, parts))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_parts(send, parts)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
