"""HTTP/1.1 as we speak it: uvicorn's protocol with limits on size and time, an id for every reply, and no upgrades.
To clients of HTTP/1.0 streams go without chunks.

A time limit costs a request that keeps it nothing: a timer is set when data has come and a request is not complete, or
when the client does not take what is sent.
"""

from __future__ import annotations

import asyncio
import enum
import re
import secrets
import select
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from quire.config.serve import ServeConfig
from quire.foundation.http10 import unchunked_for_old
from quire.foundation.log import get_logger
from quire.server.http.errors import CODES, asks_as_anthropic, error_body, is_anthropic
from quire.server.http.limits import IS_GONE
from quire.server.http.trail import REQUEST_ID

MAX_HEADER_BYTES = 64 * 1024
BODY_RATE = 1024  # bytes a second that a body must bring on average
ABORT_SECONDS = 2  # for aborted requests to say so and connections to close
HUNG_UP = getattr(select, "POLLRDHUP", 0)  # errors are told in any case
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")
_UPGRADE = frozenset({b"upgrade", b"http2-settings"})  # headers of one, and their names in the connection header
_REASONS = {
    400: b"Bad Request",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
}
log = get_logger(__name__)


class HttpConfig(uvicorn.Config):
    def __init__(self, app: ASGIApp, serve: ServeConfig) -> None:
        super().__init__(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=serve.uvicorn_log_level,
            access_log=False,
            server_header=False,
            ssl_keyfile=serve.ssl_keyfile,
            ssl_certfile=serve.ssl_certfile,
            timeout_keep_alive=serve.timeout_keep_alive,  # type: ignore[arg-type]  # a fraction will do as well
            timeout_graceful_shutdown=ABORT_SECONDS,
        )
        self.serve = serve


class HeadTooLargeError(Exception):
    """A request line and headers that are over the limit, in one piece."""


class Reading(enum.Enum):
    """What a connection is about to receive."""

    FIRST = enum.auto()  # anything at all
    NEXT = enum.auto()  # another request, or nothing any more
    HEAD = enum.auto()
    BODY = enum.auto()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Its uvicorn.Config must be an HttpConfig."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, HttpConfig)
        self._serve = config.serve
        self._is_lost = False
        self._header_bytes = 0
        self._body_bytes = 0  # since the timer was set
        self._num_requests = 0
        self._reading = Reading.FIRST
        self._timed: tuple[Reading, int] | None = None  # what the timer is for, and of which request
        self._read_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes when it was set

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._stop_read_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def _is_gone(self) -> bool:
        """Whether the client has hung up, also if the event loop has not come to see it. From any thread."""
        if self._is_lost or self.transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), HUNG_UP)
        return bool(poll.poll(0))

    # -- reading -------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._reading is not Reading.BODY:
            self._header_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if self._header_bytes <= MAX_HEADER_BYTES:
                self._refuse(400, "this is not a valid HTTP/1.1 request")
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"the request line and headers are larger than {MAX_HEADER_BYTES} bytes")
        self._time_reading()

    def _feed(self, data: bytes) -> None:
        """Nobody has to switch protocols because a client would like to (RFC 9110, 7.8): the parser, which stops there,
        gets the request once more without that wish."""
        while not self.transport.is_closing():
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(405, "CONNECT is not allowed: this is no proxy")
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(token for token in value.split(b",") if token.strip().lower() not in _UPGRADE)
            if name not in _UPGRADE and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[IS_GONE] = self._is_gone  # type: ignore[literal-required]
        self._reading = Reading.HEAD
        self._num_requests += 1

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # it comes again
        if self._header_bytes > MAX_HEADER_BYTES and self._head_size() > MAX_HEADER_BYTES:
            raise HeadTooLargeError  # the parser stops and says so; most of what it was fed may be a body
        super().on_headers_complete()  # fails if the address is none, and then there is nothing that has a body
        self._reading = Reading.BODY
        self._header_bytes = 0
        name = self._request_id()
        self.scope[REQUEST_ID] = name.decode()  # type: ignore[literal-required]
        said = [(b"x-request-id", name)] if self._serve.enable_request_id_headers else []
        if is_anthropic(self.scope["path"]) or asks_as_anthropic(self.scope):
            said.append((b"request-id", name))  # where their clients look for it, in refusals too
        self.cycle.default_headers = [*self.cycle.default_headers, *said]

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._reading = Reading.NEXT
        super().on_message_complete()

    def _request_id(self) -> bytes:
        """The client's own if it may stand in a header, else a new one."""
        given = next((value for name, value in self.headers if name == b"x-request-id"), b"")
        return given if _REQUEST_ID.fullmatch(given) else b"req_" + secrets.token_hex(12).encode()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        super()._start_asgi_task(cycle, unchunked_for_old(app, cycle))

    # -- time ----------------------------------------------------------------------------------------------------

    def _time_reading(self) -> None:
        """Set the timer of what is about to be received; the one that runs stays if it is still for that."""
        due = self._reading, self._num_requests
        if due == self._timed:
            return
        self._stop_read_timer()
        self._timed = due
        if self._reading is Reading.NEXT:
            if self.cycle.response_complete and not self.pipeline and self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(  # the body came after its answer
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            return
        self._body_bytes = 0
        is_body = self._reading is Reading.BODY
        limit = self._serve.body_timeout if is_body else self._serve.header_timeout
        if limit > 0 and not self.transport.is_closing():
            self._read_timer = self.loop.call_later(limit, self._on_slow_body if is_body else self._on_slow_head)

    def _on_slow_head(self) -> None:
        if self._reading is Reading.FIRST:
            self.transport.close()
        elif self._is_behind:
            self._timed = None
            self._time_reading()
        else:
            self._refuse(408, f"the request line and headers took more than {self._serve.header_timeout:g} s")

    def _on_slow_body(self) -> None:
        if self._is_behind or self.flow.read_paused or self._body_bytes >= BODY_RATE * self._serve.body_timeout:
            self._timed = None
            self._time_reading()
        else:
            self._refuse(408, f"the body brought less than {BODY_RATE} bytes a second")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._reading in (Reading.HEAD, Reading.BODY) and not self.transport.is_closing():
            self._timed = None  # it waited for this answer; its time begins now
            self._time_reading()
        if self.transport.get_write_buffer_size():
            self._time_sending()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time_sending()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def _time_sending(self) -> None:
        if self._send_timer is None and self._serve.send_timeout > 0:
            self._unsent = self.transport.get_write_buffer_size()
            self._send_timer = self.loop.call_later(self._serve.send_timeout, self._on_unsent)

    def _on_unsent(self) -> None:
        """The client had time to take something."""
        self._send_timer = None
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent == self._unsent:
            log.info("a client takes nothing for %g s: its connection is closed", self._serve.send_timeout)
            self.transport.abort()  # and so is what it had asked for
        elif unsent:
            self._time_sending()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    # -- refusals ------------------------------------------------------------------------------------------------

    @property
    def _is_behind(self) -> bool:
        """Whether what is being received waits for the answer to an earlier request."""
        if self._reading is Reading.BODY:
            return bool(self.pipeline)
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """Say why, and close the connection."""
        if self.transport.is_closing():
            return
        has_begun = self._reading is Reading.BODY and self.cycle.response_started
        if not self._is_behind and not has_begun:
            body = error_body(status, message)
            headers = [b"content-type: application/json", b"connection: close", b"content-length: %d" % len(body)]
            headers.append(b"x-error-code: " + CODES[status].encode())
            if self._serve.enable_request_id_headers:
                headers.append(b"x-request-id: req_" + secrets.token_hex(12).encode())
            self.transport.write(b"\r\n".join([b"HTTP/1.1 %d %b" % (status, _REASONS[status]), *headers, b"", body]))
        self.transport.close()
