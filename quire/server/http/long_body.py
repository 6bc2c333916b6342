"""Bodies that are long are received into a process beside this one, and read there (`server/body_reader.py`).

What comes back is the checked body; where it is known what an endpoint makes of its texts, that in their place. So the
front end never has a long body in its hands: it passes the bytes on as they come, and gets back what it asked for in
pieces of some microseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi import Request

from quire.config.serve import ServeConfig
from quire.engine.client import EngineInfo
from quire.foundation.errors import ContextLengthError, InputError, OverloadedError
from quire.foundation.kept_bodies import KeptBody, KeptElsewhere
from quire.foundation.value_pieces import Pieces
from quire.foundation.wire import Encoder
from quire.server.http.errors import ApiError, ClientGoneError
from quire.types.json_text import JsonText

LONG_BODY = 128 * 1024  # bytes
MANY_VALUES = 8 * 1024  # in a body that is not as long: objects, lists and commas
MAX_BODIES = 1024  # at a time
MAX_BYTES = 1024**3  # of all of them
PRIORITY = "priority"  # in the place of a kind: what a body says of it
NO_OBJECTS: Mapping[str, Callable[[Any], Any]] = {}
_LOST = "the process that reads long bodies has ended: send the request again"
_ERRORS = {kind.__name__: kind for kind in (InputError, ContextLengthError)}
T = TypeVar("T")


class Greeting(msgspec.Struct, frozen=True):
    """What the process must know. folder: of the tokenizer. template: sources and special tokens of the chat's."""

    info: EngineInfo
    serve: ServeConfig
    folder: str | None
    template: tuple[dict[str, str], dict[str, str]] | None

    def message(self) -> bytes:
        [found] = Encoder().encode(self)
        return bytes(found)


class Question(msgspec.Struct, frozen=True):
    """kind: of the body, as `name_of` says it; PRIORITY; empty: its bytes. most: characters of a prompt.

    takes_long: such ones are answered few at a time.
    """

    kind: str = ""
    path: str = ""
    most: int | None = None
    takes_long: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """What stands in the place of a long field: what its endpoint makes of it, or why it cannot."""

    value: Any

    def take(self) -> Any:
        """Raises InputError or ApiError."""
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@dataclass(frozen=True, slots=True)
class TakesLong:
    """It can be read; its texts are long, and to be asked for as such."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A body that cannot be read."""

    error: Exception


# -- what is sent ------------------------------------------------------------------------------------------------

_sent: dict[str, type] = {"prepared": Prepared, "refused": Refused, "long": TakesLong}


def sent(kind: type[T]) -> type[T]:
    """A dataclass that comes back as it was."""
    _sent[kind.__name__] = kind
    return kind


def taken_apart(value: Any) -> tuple[str, Any]:
    """Raises TypeError."""
    if isinstance(value, JsonText):
        return "text", str(value)
    if isinstance(value, ApiError):
        return "api", [value.status, value.message, value.param, value.details, value.retry_after]
    if isinstance(value, InputError):
        name = next(k.__name__ for k in type(value).__mro__ if k.__name__ in _ERRORS)
        return "error", [name, value.message, value.param]
    for tag, kind in _sent.items():
        if type(value) is kind:
            return tag, [getattr(value, field.name) for field in fields(kind)]
    raise TypeError(f"{type(value).__name__} is not sent")


def _makers() -> dict[str, Callable[[Any], Any]]:
    def maker(kind: type) -> Callable[[Any], Any]:
        return lambda values: kind(*values)

    return {
        "text": JsonText,
        "api": lambda values: ApiError(*values),
        "error": lambda values: _ERRORS[values[0]](*values[1:]),
        **{tag: maker(kind) for tag, kind in _sent.items()},
    }


# -- the front end's side ----------------------------------------------------------------------------------------


class LongBodies:
    """Of one front end. greeting: what the process must know."""

    def __init__(self, greeting: Callable[[], bytes]) -> None:
        self._keeper = KeptElsewhere("quire.server.body_reader", greeting=greeting, TOKENIZERS_PARALLELISM="false")
        self.num_bytes = 0

    @property
    def pid(self) -> int | None:
        """Of the process that forks, once it was needed."""
        return self._keeper.pid

    @property
    def num_bodies(self) -> int:
        return self._keeper.num_bodies

    async def open(self) -> LongBody:
        """Raises OverloadedError if there are too many."""
        if self.num_bodies >= MAX_BODIES:
            raise OverloadedError(f"{MAX_BODIES} requests with long bodies are being read")
        return LongBody(self, await self._keeper.open())


class LongBody:
    """Of one request. `close` it in any case."""

    def __init__(self, bodies: LongBodies, kept: KeptBody) -> None:
        self._bodies, self._kept = bodies, kept
        self._is_open = True

    def __len__(self) -> int:
        return self._kept.size

    async def add(self, part: bytes) -> None:
        """Raises OverloadedError if there is too much of all."""
        if self._bodies.num_bytes + len(part) > MAX_BYTES:
            raise OverloadedError(f"long bodies that are being read have {MAX_BYTES // 1024**2} MiB together")
        self._bodies.num_bytes += len(part)
        try:
            await self._kept.add(part)
        except ConnectionError:
            raise OverloadedError(_LOST) from None

    async def ask(
        self, request: Request, question: Question, objects: Mapping[str, Callable[[Any], Any]] = NO_OBJECTS
    ) -> Any:
        """Raises ClientGoneError if nobody waits any more, InputError if it takes too much."""
        pieces = Pieces({**_makers(), **objects})
        asked = self._kept.ask(msgspec.msgpack.encode(question), pieces, takes_long=question.takes_long)
        try:
            found = await _while_there(request, asked)
        except ConnectionError:
            raise OverloadedError(_LOST) from None
        except EOFError:
            raise InputError("the request body takes too much memory or processor time to read") from None
        if isinstance(found, TakesLong):
            return await self.ask(request, msgspec.structs.replace(question, takes_long=True), objects)
        return found

    async def content(self, request: Request) -> bytes:
        """Its bytes."""
        found: np.ndarray = await self.ask(request, Question())
        return found.tobytes()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._bodies.num_bytes -= self._kept.size
            self._kept.close()


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """`work`, unless the client leaves: then it is cancelled."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        leaving.cancel()


async def _left(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
