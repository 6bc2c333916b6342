"""The lines of a batch: read, asked of the server's own endpoints, answered one by one."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from starlette.types import ASGIApp, Message

from quire.foundation.aside import aside
from quire.foundation.errors import EngineDeadError, InputError
from quire.foundation.log import get_logger
from quire.foundation.shown import clipped, shown
from quire.server.batches.journal import Journal
from quire.server.http.entry import IN_BACKGROUND
from quire.server.http.errors import MAX_MESSAGE
from quire.server.http.shape import check_shape
from quire.server.service import Service

log = get_logger(__name__)

RETRY_SECONDS = 1.0  # before a line is asked again that the server had no room for
CHUNK = 64  # lines read at a time
CHUNK_BYTES = 8 * 1024 * 1024  # or so many bytes, and the line that exceeds them


@dataclass(frozen=True, slots=True)
class Line:
    """`id` tells the line from all others of its file: its number, and a digest of its bytes."""

    id: str
    raw: bytes
    is_too_long: bool = False


class ServerGoneError(Exception):
    """The server ends: the line was not answered, and will be asked again."""


def read_lines(path: Path, max_bytes: int) -> Iterator[Line]:
    """Lines that are not blank. Of one that is longer than `max_bytes` only the beginning is kept."""
    with open(path, "rb") as file:
        for number in itertools.count(1):
            raw = file.readline(max_bytes + 1)
            if not raw:
                return
            if number == 1:
                raw = raw.removeprefix(BOM_UTF8)  # as programs on Windows write it
            is_too_long = len(raw) > max_bytes and not raw.endswith(b"\n")
            rest = raw
            while is_too_long and rest and not rest.endswith(b"\n"):
                rest = file.readline(1024 * 1024)
            if raw.strip():
                digest = hashlib.sha256(raw.strip()).hexdigest()[:16]
                yield Line(f"batch_req_{number}_{digest}", raw[:max_bytes], is_too_long)


def _take(lines: Iterator[Line]) -> list[Line]:
    """The next ones; empty at the end."""
    found, size = [], 0
    for line in itertools.islice(lines, CHUNK):
        found.append(line)
        size += len(line.raw)
        if size > CHUNK_BYTES:
            break
    return found


def count_lines(path: Path) -> int:
    """Lines that are not blank."""
    with open(path, "rb") as file:
        return sum(1 for line in file if line.removeprefix(BOM_UTF8).strip())


class LineRunner:
    """Asks the app the lines of a file, `width` at a time.

    endpoints: which URLs lines may have.
    """

    def __init__(self, app: ASGIApp, service: Service, endpoints: Collection[str], width: int) -> None:
        self._app = app
        self._service = service
        self._endpoints = endpoints
        self._width = width

    async def run(self, path: Path, journal: Journal) -> None:
        """All lines that `journal` has no result of. A line that fails is a result and harms no other.

        Raises ServerGoneError or EngineDeadError if the rest cannot be asked here, OSError if results cannot be kept.
        """
        free = asyncio.Semaphore(self._width)
        lines = read_lines(path, self._service.serve.max_body_bytes)
        seen: set[str] = set()  # custom ids

        async def answer(line: Line, request: dict[str, Any] | InputError) -> None:
            try:
                journal.add(await self._answer(line, request))
            finally:
                free.release()

        try:
            async with asyncio.TaskGroup() as group:
                while chunk := await asyncio.to_thread(_take, lines):
                    for line in chunk:
                        request = await aside(partial(self._parse, line, seen), len(line.raw))
                        if line.id not in journal.done:
                            await free.acquire()
                            group.create_task(answer(line, request))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _parse(self, line: Line, seen: set[str]) -> dict[str, Any] | InputError:
        """The request of a line, or what is wrong with it."""
        try:
            request = _parse(line, self._endpoints, self._service.serve.max_body_bytes)
        except InputError as error:
            return error
        name = request["custom_id"]
        if name in seen:
            return InputError(f"custom_id {name[:80]!r} is that of an earlier line too", "custom_id")
        seen.add(name)
        return request

    async def _answer(self, line: Line, request: dict[str, Any] | InputError) -> dict[str, Any]:
        """The result as the result files hold it."""
        if isinstance(request, InputError):
            failure = {"code": "invalid_request", "message": clipped(request.message, MAX_MESSAGE)}
            return {"id": line.id, "custom_id": _custom_id(line), "response": None, "error": failure}
        request_id = f"req_{secrets.token_hex(12)}"
        content = orjson.dumps(request["body"])
        while True:
            status, body = await post(self._app, request["url"], content, request_id)
            if status != 503:
                break
            if problem := self._service.dead():
                raise EngineDeadError(problem)
            if self._service.closed:
                raise ServerGoneError
            await asyncio.sleep(RETRY_SECONDS)
        reply = orjson.loads(body)
        failed = None if status == 200 else {"code": str(status), "message": reply["error"]["message"]}
        response = {"status_code": status, "request_id": request_id, "body": reply}
        return {"id": line.id, "custom_id": request["custom_id"], "response": response, "error": failed}


def _parse(line: Line, endpoints: Collection[str], max_bytes: int) -> dict[str, Any]:
    if line.is_too_long:
        raise InputError(f"the line is longer than {max_bytes} bytes (option max_body_bytes)")
    check_shape(line.raw)
    try:
        request = orjson.loads(line.raw)
    except orjson.JSONDecodeError as error:
        raise InputError(f"the line is not valid JSON: {error}") from None
    if not isinstance(request, dict):
        raise InputError(f"the line must be a JSON object, got {type(request).__name__}")
    if not isinstance(request.get("custom_id"), str):
        raise InputError("the line needs a custom_id, a string", "custom_id")
    if request.get("method", "POST") != "POST":
        raise InputError(f"method must be POST, got {shown(request['method'])}", "method")
    if request.get("url") not in endpoints:
        raise InputError(f"url must be {' or '.join(endpoints)}, got {shown(request.get('url'))}", "url")
    body = request.get("body")
    if not isinstance(body, dict):
        raise InputError(f"body must be a JSON object, got {type(body).__name__}", "body")
    for field in ("stream", "background"):
        if body.get(field):
            raise InputError(f"{field} has no place in a batch", field)
    if request["url"] == "/v1/responses":
        body.setdefault("store", False)
    return request


def _custom_id(line: Line) -> str | None:
    """Of a line that is wrong: what can be read of it."""
    try:
        return str(orjson.loads(line.raw)["custom_id"])
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None


async def post(app: ASGIApp, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """Status and body of a request that never was on a wire. Being cancelled aborts it."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
        "client": None,
        "server": None,
        IN_BACKGROUND: True,
    }
    inbox: list[Message] = [{"type": "http.request", "body": body}]
    status, parts = 500, []

    async def receive() -> Message:
        if not inbox:
            await asyncio.Event().wait()  # this client does not go away
        return inbox.pop()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:
        if not parts:
            raise
        log.exception("a line of a batch failed")  # it was answered with a 500
    return status, b"".join(parts)
