"""What a client may send, and what is being answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NoReturn

import msgspec
import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.foundation.errors import InputError
from quire.foundation.shown import clipped
from quire.server.http.errors import ApiError, error_response
from quire.server.processes.shared_counters import ANSWERS, SharedCounters

MAX_JSON_DEPTH = 64
MAX_VALUES = 1024 * 1024  # of a body's JSON
MAX_LISTS = 128 * 1024  # and objects
SCANNED_AT_ONCE = 256 * 1024  # bytes
MAX_NAME = 64  # characters of a field's, in a message
MAX_PROMPTS = 1024
FORM_BYTES = 16 * 1024  # of an upload beside the file
MAX_ANSWERS = 1024  # prompts x n of one request
IS_GONE = "quire.is_gone"  # in the scope of a request that came over a connection: whether the client has hung up
_QUOTE, _COMMA = b'",'
_NESTING = np.zeros(256, np.int8)  # of JSON's bytes, outside of strings
_NESTING[list(b"[{")], _NESTING[list(b"]}")] = 1, -1
_IS_MARK = _NESTING != 0
_IS_MARK[[_QUOTE, _COMMA]] = True


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
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > max_bytes:
            # The rest of the body is not worth reading, so the connection cannot serve another request.
            refusal = error_response(413, message, headers={"connection": "close"}, path=scope["path"])
            await refusal(scope, receive, send)
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


def check_shape(body: bytes) -> None:
    """Raise InputError if the JSON is nested deeper than MAX_JSON_DEPTH (templates and schemas recurse over it), or has
    more values than Python makes objects of in a moment.

    Read off the bytes, before objects are made of them, a piece at a time: between pieces other threads go on.
    """
    if len(body) <= MAX_VALUES and body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    start, values, lists, depth, in_text = 0, 1, 0, 0, 0
    while start < len(body):
        end = start + SCANNED_AT_ONCE
        while body[end - 1 : end] == b"\\" and end < len(body):
            end += 1  # an escape is in one piece
        text = np.frombuffer(body[start:end].replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        marks = text[_IS_MARK.take(text)]
        is_text = ((np.cumsum(marks == _QUOTE) + in_text) & 1).astype(bool)
        nesting = np.where(is_text, 0, _NESTING.take(marks))
        depths = depth + np.cumsum(nesting)
        values += int(np.count_nonzero((marks == _COMMA) & ~is_text))
        lists += int(np.count_nonzero(nesting == 1))
        if depths.max(initial=0) > MAX_JSON_DEPTH:
            raise InputError(f"the JSON body is nested deeper than {MAX_JSON_DEPTH} levels")
        if values > MAX_VALUES or lists > MAX_LISTS:
            _refuse_shape(body)
        if len(marks):
            depth, in_text = int(depths[-1]), int(is_text[-1])
        start = end


def _refuse_shape(body: bytes) -> NoReturn:
    """Naming the field that has the most."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = {}
    name = max(fields, key=lambda name: memoryview(fields[name]).nbytes, default=None)
    raise InputError(
        f"{clipped(name or 'the body', MAX_NAME)} holds too much: a body may have {MAX_VALUES} values, and "
        f"{MAX_LISTS} objects and lists",
        None if name is None else clipped(name, MAX_NAME),
    )


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
