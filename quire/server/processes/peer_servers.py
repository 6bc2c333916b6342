"""Requests that only one of several front ends can answer find it, whichever of them they came to.

Files and batches live with front end 0. A stored response lives where it was made: its id says where if we made it up,
and the others are asked for what is not here. Front ends ask each other over Unix sockets in a private folder: what
comes that way has been let in already (keys, limits), and is not sent on again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.foundation.log import get_logger
from quire.server.http.body import whole_body
from quire.server.http.entry import IN_BACKGROUND
from quire.server.http.errors import ApiError, NotStoredError, error_response, explain
from quire.server.http.limits import OpenAnswers
from quire.server.http.sse import LiveReply
from quire.server.processes.peer_request import Head, PeerGoneError, PeerRequest
from quire.server.responses.store import Item, ResponseStore, number_of

Handler = Callable[[Any], Awaitable[Any]]  # plain data → what can be written as JSON
OWNER = 0  # of files and batches
PATIENCE = 2.0  # seconds for an answer out of memory
_OWNED = ("/v1/files", "/v1/batches")
_FROM_PEER = "quire.from_sibling"  # in the scope of a request that another front end has sent on
_ITEMS_PATH = b"/items"  # between peers only
_BACKGROUND_HEADER = b"x-quire-in-background"  # of such a request: IN_BACKGROUND
_NOT_STORED_HEADER = b"x-quire-not-stored"  # of its answer: what it names is not here either
log = get_logger(__name__)


def private_socket(folder: Path, number: int) -> Path:
    return folder / f"http-{number}"


class PeerServers:
    """The other front ends of this server."""

    def __init__(self, folder: Path, count: int, number: int, in_flight: OpenAnswers) -> None:
        self.number = number
        self._paths = [private_socket(folder, i) for i in range(count)]
        self._in_flight = in_flight
        self._handlers: dict[bytes, Handler] = {}

    # -- what is installed ---------------------------------------------------------------------------------------

    def install(self, app: FastAPI) -> None:
        """Let `app` ask the others for stored responses that it does not have."""

        async def elsewhere(request: Request, error: Exception) -> Response:
            assert isinstance(error, NotStoredError)
            if request.scope.get(_FROM_PEER):
                headers = {_NOT_STORED_HEADER.decode(): "1"}
                return error_response(*explain(error), headers=headers, path=request.url.path)
            nowhere = ApiError(error.status, error.message, error.param)
            answer = self._ask(request.scope, await whole_body(request), self._holders(error.response_id), nowhere)
            return Relay(self._in_flight, answer)

        app.add_exception_handler(NotStoredError, elsewhere)
        app.state.peers = self
        store: ResponseStore = app.state.responses

        async def tell_items(ids: list[str]) -> dict[str, Item]:
            return {item_id: item for item_id in ids if (item := store.item(item_id)) is not None}

        self.answer(_ITEMS_PATH, tell_items)

    def answer(self, path: bytes, handler: Handler) -> None:
        """What `handler` makes of a question that another front end asks at `path`."""
        self._handlers[path] = handler

    def with_owner(self, app: ASGIApp) -> ASGIApp:
        """`app`, but files and batches are their owner's."""
        if self.number == OWNER:
            return app

        async def owned(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"] if scope["type"] == "http" else ""
            if not any(path == one or path.startswith(one + "/") for one in _OWNED):
                await app(scope, receive, send)
                return
            away = ApiError(503, "the process that keeps files and batches is starting again")
            try:
                await _pass_on(self._ask(scope, _body(receive), [OWNER], away), send)
            except ApiError as error:
                await error_response(*explain(error), path=scope["path"])(scope, receive, send)

        return owned

    def with_door(self, public: ASGIApp, app: ASGIApp) -> ASGIApp:
        """`public` for all but the peers, who come to `app` itself."""
        address = (str(self._paths[self.number]), None)

        async def door(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["server"] != address:
                await public(scope, receive, send)
            elif (handler := self._handlers.get(scope["raw_path"])) is not None:
                found = await handler(msgspec.json.decode(await Request(scope, receive).body()))
                await Response(msgspec.json.encode(found), media_type="application/json")(scope, receive, send)
            else:
                in_background = any(name == _BACKGROUND_HEADER for name, _ in scope["headers"])
                await app({**scope, _FROM_PEER: True, IN_BACKGROUND: in_background}, receive, send)

        return door

    # -- asking --------------------------------------------------------------------------------------------------

    async def has_response(self, scope: Scope, response_id: str) -> bool:
        """Whether one of the others keeps such a response."""
        if scope.get(_FROM_PEER):
            return False
        look = {**scope, "method": "GET", "raw_path": b"/v1/responses/" + response_id.encode(), "query_string": b""}
        nowhere = ApiError(404, "")
        async with aclosing(self._ask(look, b"", self._holders(response_id), nowhere)) as answer:
            try:
                head = await anext(answer)
            except ApiError:
                return False
        return isinstance(head, Head) and head.status == 200

    async def items(self, ids: Sequence[str]) -> dict[str, Item]:
        """Those input and output items with these ids that the others keep."""
        found: dict[str, Item] = {}
        for items in (await self.ask_all(_ITEMS_PATH, ids)).values():
            found |= items
        return found

    async def ask_all(self, path: bytes, question: Any) -> dict[int, Any]:
        """What the others `answer`, by their numbers; who is starting again, or hangs, says nothing. Plain data."""
        numbers = self.others
        asked = [asyncio.wait_for(self._ask_one(number, path, question), PATIENCE) for number in numbers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, OSError | PeerGoneError):
                raise answer  # TimeoutError is an OSError
        pairs = zip(numbers, answers, strict=True)
        return {number: answer for number, answer in pairs if not isinstance(answer, BaseException)}

    async def _ask_one(self, number: int, path: bytes, question: Any) -> Any:
        request = PeerRequest(self._paths[number])
        try:
            headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
            head = await request.ask(b"POST", path, headers, msgspec.json.encode(question))
            answer = b"".join([piece async for piece in request.body()])
        finally:
            request.close()
        if head.status != 200:
            raise PeerGoneError(f"front end {number} answers {path.decode()} with {head.status}")
        return msgspec.json.decode(answer)

    @property
    def others(self) -> list[int]:
        """Their numbers."""
        return [i for i in range(len(self._paths)) if i != self.number]

    def _holders(self, response_id: str) -> list[int]:
        """The others, first the one where it was made if its id says so."""
        return sorted(self.others, key=lambda i: i != number_of(response_id))

    async def _ask(
        self, scope: Scope, body: bytes | AsyncIterator[bytes], numbers: Sequence[int], refusal: ApiError
    ) -> AsyncGenerator[Head | bytes, None]:
        """The first answer of those who have what is asked for: its head, then its body. `refusal` if nobody has it.

        A body that is not read yet can be sent to one only. Raises PeerGoneError if the answer breaks off.
        """
        headers = list(scope["headers"])
        if scope.get(IN_BACKGROUND):
            headers.append((_BACKGROUND_HEADER, b"1"))
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        for number in numbers:
            request = PeerRequest(self._paths[number])
            try:
                try:
                    head = await request.ask(scope["method"].encode(), target, headers, body)
                except (OSError, PeerGoneError) as error:  # it is starting again, and what it kept is lost
                    log.warning("front end %d does not answer: %s", number, error)
                    continue
                if not any(name == _NOT_STORED_HEADER for name, _ in head.headers):
                    yield head
                    async for piece in request.body():
                        yield piece
                    return
            finally:
                request.close()
        raise refusal


class Relay(LiveReply):
    """Passes an answer on while the client listens."""

    def __init__(self, in_flight: OpenAnswers, answer: AsyncGenerator[Head | bytes, None]) -> None:
        super().__init__(in_flight, 0)  # it counts where it is made
        self._answer = answer

    async def produce(self, send: Send) -> None:
        async def begin(message: Message) -> None:
            self.started = True
            await send(message)

        await _pass_on(self._answer, begin)


async def _pass_on(answer: AsyncGenerator[Head | bytes, None], send: Send) -> None:
    """Raises what `answer` does before its head. What breaks off later is cut off: the connection closes unfinished."""
    has_begun = False
    async with aclosing(answer):
        try:
            async for part in answer:
                if isinstance(part, Head):
                    has_begun = True
                    await send({"type": "http.response.start", "status": part.status, "headers": part.headers})
                else:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except PeerGoneError as error:
            assert has_begun
            log.warning("the answer of another front end broke off: %s", error)
            return
    await send({"type": "http.response.body", "body": b""})


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    """The pieces of a request's body. Raises PeerGoneError if the client leaves meanwhile."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise PeerGoneError("the client has left")
        yield message.get("body", b"")
        more = message.get("more_body", False)
