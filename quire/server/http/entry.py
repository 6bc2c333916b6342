"""How requests for the engine come in: past the door, before their bodies are looked into."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from fastapi import Request

from quire.server.http.body import body_bytes, is_gone
from quire.server.http.errors import ClientGoneError
from quire.server.http.limits import IS_GONE
from quire.server.http.long_body import PRIORITY, LongBody, Question
from quire.server.service import Service

IN_BACKGROUND = "quire.in_background"  # in the scope of a request that nobody waits for
_LET_IN = "quire.let_in"  # in the scope of a request that was let in and that the engine has not got
# The POST routes whose answers the engine makes.
ENGINE_ROUTES = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/messages",
        "/inference/v1/generate",
        "/generative_scoring",
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/v2/embed",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/invocations",
    }
)


class _Priority(msgspec.Struct):
    priority: int = 0


_PRIORITY = msgspec.json.Decoder(_Priority)


async def enter(request: Request) -> AsyncIterator[None]:
    """A dependency of routes. Raises ApiError 503 if the request would wait too long, ClientGoneError if nobody does.

    Requests in the background wait behind all others, and for nobody's sake: they always come in.
    """
    scope = request.scope
    service: Service = request.app.state.service
    if request.method != "POST" or scope["route"].path not in ENGINE_ROUTES or scope.get(IN_BACKGROUND):
        yield
        return
    gone = scope.get(IS_GONE)
    if gone is not None:
        is_gone.set(gone)
        if gone():
            raise ClientGoneError
    door = service.door
    if door is None:
        yield
        return
    door.enter(await _priority(request, service))
    scope[_LET_IN] = True
    try:
        yield
    finally:
        if scope.pop(_LET_IN, False):
            door.give_up()


async def _priority(request: Request, service: Service) -> int:
    """Only where priorities count is a body read for it; what is wrong with it, others say."""
    if service.config.schedule.scheduling_policy != "priority":
        return 0
    raw = await body_bytes(request)
    if isinstance(raw, LongBody):
        return int(await raw.ask(request, Question(PRIORITY)))
    return priority_of(raw)


def priority_of(raw: bytes | bytearray) -> int:
    try:
        return _PRIORITY.decode(raw).priority
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0


def hand_over(request: Request, count: int) -> None:
    """The engine gets `count` requests of its own for this one."""
    door = request.app.state.service.door
    if door is not None and request.scope.pop(_LET_IN, False):
        door.hand_over(count)


def retry_seconds(service: Service) -> int | None:
    """When one that the engine refused may come again; None if nothing is known."""
    return None if service.door is None else service.door.retry_after()
