"""What a client may send, and what is being answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.http.errors import ApiError, error_response
from quire.server.processes.shared_counters import ANSWERS, SharedCounters

MAX_PROMPTS = 1024
FORM_BYTES = 16 * 1024  # of an upload beside the file
MAX_ANSWERS = 1024  # prompts x n of one request
LEISURE_SECONDS, LEISURE_BYTES = 5.0, 1 << 28  # that are spent on a body which has been refused
IS_GONE = "quire.is_gone"  # in the scope of a request that came over a connection: whether the client has hung up


class BodyLimitMiddleware:
    """Answers 413 to a request body of more than `max_bytes`, before it is read if its length is announced.

    uploads: bytes of a file that may be sent to a path.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, uploads: Mapping[str, int]) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.uploads = uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        max_bytes, message = self._limit(scope["path"])
        headers = dict(scope["headers"])
        announced = headers.get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > max_bytes:
            # The rest of the body is not worth reading, so the connection cannot serve another request.
            refusal = error_response(413, message, headers={"connection": "close"}, path=scope["path"])
            waits = b"expect" in headers  # for a word to send it, which to read would give
            await refusal(scope, receive, send if waits else _at_leisure(receive, send))
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            part = await receive()
            seen += len(part.get("body", b""))
            if seen > max_bytes:
                raise ApiError(413, message)
            return part

        await self.app(scope, counted, send)

    def _limit(self, path: str) -> tuple[int, str]:
        """Bytes of the body, and what is said of one that is larger."""
        if path not in self.uploads:
            most = self.max_bytes
            return most, f"the request body is larger than {most} bytes (option max_body_bytes)"
        most = self.uploads[path]
        return most + FORM_BYTES, f"the file is larger than {most} bytes (option max_batch_file_bytes)"


def _at_leisure(receive: Receive, send: Send) -> Send:
    """Sends a reply, and ends it when the client has sent its body, or had time to see that nobody wants it.

    To a connection that is closed with something in it unread the system answers by a reset, at which many clients
    forget the reply that they have.
    """

    async def discard() -> None:
        seen = 0
        while seen < LEISURE_BYTES:
            part = await receive()
            seen += len(part.get("body", b""))
            if not part.get("more_body", False):
                return

    async def send_and_wait(message: Message) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        await send({**message, "more_body": True})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(discard(), LEISURE_SECONDS)
        await send({"type": "http.response.body", "body": b""})

    return send_and_wait


class OpenAnswers:
    """The requests being answered: how many answers that makes, and their tasks, so that a shutdown can end them.

    keepalive_interval: seconds of silence after which streams say that they live; 0: never. board: where it counts.
    """

    def __init__(self, counters: SharedCounters, keepalive_interval: float) -> None:
        self.keepalive_interval = keepalive_interval
        self.tasks: set[asyncio.Task[None]] = set()
        self._counters = counters

    @property
    def num_answers(self) -> int:
        """Of this process."""
        return int(self._counters.mine[ANSWERS])

    @num_answers.setter
    def num_answers(self, count: int) -> None:
        self._counters.mine[ANSWERS] = count

    def total(self) -> int:
        """Of all processes of the server."""
        return int(self._counters.sum(ANSWERS))
