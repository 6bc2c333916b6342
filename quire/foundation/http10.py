"""Clients of HTTP/1.0 (nginx unless it is told otherwise, ab, old monitors) get no chunks, which they do not know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Any, Send], Awaitable[None]]


class Unchunked:
    """An ASGI app to one of them: what has no length ends with the connection.

    cycle: uvicorn's, of the request.
    """

    def __init__(self, app: App, cycle: Any) -> None:
        self._app, self._cycle = app, cycle

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        cycle, has_length = self._cycle, True

        async def send_plainly(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = None if has_length else False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))  # of each part, as it comes
            await send(message)

        await self._app(scope, receive, send_plainly)


def unchunked_for_old(app: App, cycle: Any) -> App:
    """`app`, or what stands before it if the client speaks HTTP/1.0."""
    return Unchunked(app, cycle) if cycle.scope["http_version"] == "1.0" else app
