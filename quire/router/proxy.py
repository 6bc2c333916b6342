"""A request on its way to a server, and the answer back: byte for byte.

It may go to another server as long as nothing of an answer is there: neither head nor body is told before the body's
first byte has come, or its end. From then on a server that is lost breaks the answer off.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

from starlette.types import Receive, Scope, Send

from quire.config.route import RouteConfig
from quire.foundation.log import get_logger
from quire.foundation.shown import clipped
from quire.router.backend import Backend
from quire.router.choose import Chooser
from quire.router.fleet import Fleet
from quire.router.metrics import RouterMetrics
from quire.router.prompt import Wish, read_wish
from quire.router.upstream import Connection, Head, UpstreamError

# Of the connection, not of the message.
_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect",
    }
)  # fmt: skip
_HOP_BACK = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"trailer"})
_STORED = re.compile(rb'"id"\s*:\s*"((?:resp|file|batch)[_-][A-Za-z0-9_-]+)"')
_STORING = ("/v1/responses", "/v1/files", "/v1/batches")
_HOME = "stored things"  # the session of what only one server has, and nobody knows which
WAIT_SECONDS = 10.0  # for a server, while none takes requests
log = get_logger(__name__)


class GoneError(Exception):
    """The client."""


class Proxy:
    def __init__(self, config: RouteConfig, fleet: Fleet, chooser: Chooser, metrics: RouterMetrics) -> None:
        self._config, self._fleet, self._chooser, self._metrics = config, fleet, chooser, metrics
        self._session_header = config.session_header.lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        try:
            body = await read_body(receive, self._config.max_body_bytes)
        except GoneError:
            return
        if body is None:
            await reply_error(send, 413, f"the body is larger than {self._config.max_body_bytes} bytes")
            return
        session = next(
            (value.decode("latin-1") for name, value in scope["headers"] if name == self._session_header), None
        )
        wish = read_wish(scope["path"], body, hashes=self._chooser.wants_hashes)
        exchange = Exchange(self, scope, body, wish, session or self._home(scope["path"]), began)
        await exchange.run(receive, send)

    def _home(self, path: str) -> str | None:
        """Stored things are on one server: that of their id, which is in the path, or the one for all."""
        return _HOME if path.startswith((*_STORING[1:], "/v1/responses/")) else None


class Exchange:
    """One request."""

    def __init__(self, proxy: Proxy, scope: Scope, body: bytes, wish: Wish, session: str | None, began: float) -> None:
        self._proxy = proxy
        self._fleet, self._chooser, self._metrics = proxy._fleet, proxy._chooser, proxy._metrics
        self._config = proxy._config
        self._scope, self._body, self._wish, self._session, self._began = scope, body, wish, session, began
        self._connection: Connection | None = None
        self._is_gone = False  # the client

    async def run(self, receive: Receive, send: Send) -> None:
        watch = asyncio.ensure_future(receive())  # ends when the client goes
        watch.add_done_callback(self._on_gone)
        tried: set[str] = set()
        last: tuple[Head, bytes] | None = None
        why = "no server takes requests"
        try:
            while len(tried) < self._config.max_attempts and not self._is_gone:
                backend = await self._choose(tried, wait=not tried)
                if backend is None:
                    break
                tried.add(backend.url)
                try:
                    refusal = await self._attempt(backend, send)
                    if refusal is None:
                        return
                    last = refusal if last is None or refusal[0].status != 404 else last  # who has the model knows more
                except UpstreamError as error:
                    if self._is_gone:
                        return
                    why = f"{backend.url}: {error}"
                    backend.num_failures += 1
                    backend.breaker.fail(at_once=error.is_refusal)
                self._metrics.retries.labels(backend.url).inc()
            if not self._is_gone:
                await self._refuse(send, last, why)
        finally:
            watch.remove_done_callback(self._on_gone)
            watch.cancel()

    def _on_gone(self, _watch: asyncio.Future[Any]) -> None:
        self._is_gone = True
        if self._connection is not None:
            self._connection.close()

    async def _choose(self, tried: set[str], *, wait: bool) -> Backend | None:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            able = [backend for backend in self._fleet.able if backend.url not in tried]
            home = self._chooser.home_of(self._scope["path"].split("/")[3], able) if self._has_id else None
            backend = home or self._chooser.choose(able, self._wish, self._session)
            left = deadline - time.monotonic()
            if backend is not None or not wait or left <= 0:
                return backend
            self._fleet.changed.clear()
            try:
                await asyncio.wait_for(self._fleet.changed.wait(), left)
            except TimeoutError:
                return None

    @property
    def _has_id(self) -> bool:
        path: str = self._scope["path"]
        return path.startswith(_STORING) and path.count("/") >= 3

    async def _attempt(self, backend: Backend, send: Send) -> tuple[Head, bytes] | None:
        """Ask this server. None: it has answered; else its refusal, which others may not share.

        Raises UpstreamError if it has gone before anything came of it.
        """
        backend.in_flight += 1
        backend.num_requests += 1
        self._chooser.note(self._wish, backend)
        try:
            connection, head = await self._ask(backend)
            try:
                if self._others_may_not_share(backend, head.status):
                    return head, await _whole(connection)
                backend.breaker.succeed()
                if self._wish.model:
                    backend.has_other_models |= (self._wish.model in backend.model_ids) == (head.status == 404)
                await self._answer(backend, connection, head, send)
                return None
            finally:
                backend.pool.give_back(connection)
                self._connection = None
        finally:
            backend.in_flight -= 1
            self._fleet.settle(backend)

    def _others_may_not_share(self, backend: Backend, status: int) -> bool:
        """Whether a refusal may be of this server alone: it has no room, or no model of that name. Adapters come and
        go, so another may have it that has not been asked for its models since."""
        is_strange = bool(self._wish.model) and self._wish.model not in backend.model_ids
        return (status == 503 or (status == 404 and is_strange)) and len(self._fleet.backends) > 1

    async def _ask(self, backend: Backend) -> tuple[Connection, Head]:
        request = head_for(self._scope, self._body, backend)
        connection = self._connection = await backend.pool.take()
        try:
            return connection, await connection.ask(request, self._body, is_head=self._scope["method"] == "HEAD")
        except UpstreamError as error:
            if not error.was_kept:
                raise
        except BaseException:
            connection.close()
            raise
        connection = self._connection = await backend.pool.take(fresh=True)
        return connection, await connection.ask(request, self._body, is_head=self._scope["method"] == "HEAD")

    async def _answer(self, backend: Backend, connection: Connection, head: Head, send: Send) -> None:
        status = head.status
        self._metrics.requests.labels(backend.url, str(status)).inc()
        self._metrics.first_byte.labels(backend.url).observe(time.perf_counter() - self._began)
        headers = [item for item in head.headers if item[0] not in _HOP_BACK]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        is_first = self._scope["path"].startswith(_STORING)
        try:
            while body := await connection.read():
                if is_first:
                    is_first = False
                    for name in _STORED.findall(body[:4096]):
                        self._chooser.store(name.decode(), backend)
                more = not connection.is_at_end
                await send({"type": "http.response.body", "body": body, "more_body": more})
                if not more:
                    return
        except UpstreamError as error:
            if self._is_gone:
                return
            self._metrics.broken.labels(backend.url).inc()
            log.warning("%s broke off an answer: %s", backend.url, error)
            backend.breaker.fail()
            raise BrokenAnswerError from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _refuse(self, send: Send, last: tuple[Head, bytes] | None, why: str) -> None:
        self._metrics.refused.inc()
        if last is None:
            await reply_error(send, 503, f"no server answers: {why}")
            return
        head, body = last
        if head.status == 404 and any(self._wish.model in backend.model_ids for backend in self._fleet.backends):
            await reply_error(send, 503, f"no server that has the model {clipped(self._wish.model, 128)!r} answers")
            return
        await reply_whole(send, head, body)


async def read_body(receive: Receive, most: int) -> bytes | None:
    """The body; None if it is longer than `most` bytes. Raises GoneError."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            return None
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def head_for(scope: Scope, body: bytes, backend: Backend) -> bytes:
    """What a client asks, as it is asked of a server."""
    target = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1\r\nhost: " + backend.host_header]
    lines += [name + b": " + value for name, value in scope["headers"] if name not in _HOP]
    if body or scope["method"] in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _whole(connection: Connection) -> bytes:
    """What is left of an answer. Raises UpstreamError."""
    parts = []
    while part := await connection.read():
        parts.append(part)
    return b"".join(parts)


class BrokenAnswerError(Exception):
    """Of a server that has gone: the client's connection is to be closed, so that it does not look whole."""


async def reply_json(send: Send, value: object, status: int = 200, *, kind: str = "application/json") -> None:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def reply_whole(send: Send, head: Head, body: bytes) -> None:
    """A server's answer."""
    headers = [item for item in head.headers if item[0] not in _HOP_BACK]
    await send({"type": "http.response.start", "status": head.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def reply_error(send: Send, status: int, message: str) -> None:
    kind = "service_unavailable" if status == 503 else "invalid_request_error"
    await reply_json(send, {"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
