"""From the bytes of a request body to a checked model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any, ClassVar, TypeVar

import msgspec
import orjson
from fastapi import Request
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticUndefined
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.foundation.aside import LONG
from quire.foundation.errors import InputError
from quire.foundation.log import get_logger
from quire.foundation.shown import shown
from quire.frontend.text import most_chars
from quire.server.http import long_body
from quire.server.http.errors import ClientGoneError
from quire.server.http.field_limits import most_bytes
from quire.server.http.long_body import LONG_BODY, MANY_VALUES, LongBodies, LongBody, Question, Refused
from quire.server.http.shape import check_shape
from quire.types.json_text import JsonText

log = get_logger(__name__)
T = TypeVar("T")
is_gone: ContextVar[Callable[[], bool]] = ContextVar("is_gone", default=lambda: False)  # the client of this request
_TEXT = "text"
SCHEMAS = {  # the fields that hold them
    "response_format": {"json_schema": {"schema": _TEXT}},
    "structured_outputs": {"json": _TEXT, "structural_tag": _TEXT},
    "guided_json": _TEXT,
    "output_config": {"format": {"schema": _TEXT}},
    "output_format": {"schema": _TEXT},
}
# Fields that change no answer, wherever they are known.
CHANGES_NOTHING = frozenset(
    {
        "metadata",
        "model",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
        "service_tier",
        "shared",
        "store",
        "stream_options",
        "user",
    }
)
_LONG_BODY = "quire.long_body"  # in the scope of a request that has one
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _fail_fast(schema: Any) -> None:
    """One item of a list that is wrong is enough to say so: no error is made for each of a million."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Body(BaseModel):
    """Base of all request bodies: exact types, `null` means "not given", unknown fields are ignored.

    What the official clients know is a field, or it is `unsupported`, or it is `without_effect`, as docs/api.md says.
    A field of another body of its `family` that would change the answer there is refused, unless it says what is usual.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())
    unsupported: ClassVar[tuple[str, ...]] = ()  # fields that would change the answer: not to be dropped silently
    without_effect: ClassVar[tuple[str, ...]] = ()  # fields that change nothing here
    family: ClassVar[str] = ""  # bodies that ask for the same in different ways
    instead: ClassVar[Mapping[str, str]] = {}  # what fields of others of its family are called here
    within: ClassVar[str] = ""  # the field that holds this
    also_read: ClassVar[tuple[str, ...]] = ()  # fields that are handed on to another body
    max_bytes: ClassVar[Mapping[str, int]] = {}  # of fields whose limit differs from that of others by their name

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        _foreign.cache_clear()  # a body more may have fields more

    @model_validator(mode="before")
    @classmethod
    def _read_given(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in cls.unsupported:
            if data.get(name):
                path = f"{cls.within}.{name}" if cls.within else name
                raise InputError(f"{path} is not supported by this version", cls.within or name)
        if cls.family:
            _refuse_foreign(cls, data)
        return {key: value for key, value in data.items() if value is not None}


def _refuse_foreign(kind: type[Body], data: Mapping[str, Any]) -> None:
    """Raises InputError for a field that another endpoint has, and would be dropped here."""
    usual = _foreign(kind)
    for name in sorted(data.keys() & usual.keys()):
        value = data[name]
        says_nothing = value is None or value in ("", [], {})
        if not says_nothing and not any(_is_same(value, one) for one in usual[name]):
            instead = f"; use {kind.instead[name]}" if name in kind.instead else ""
            raise InputError(f"{name} is not a field of this endpoint{instead}", name)


def _is_same(value: Any, usual: Any) -> bool:
    return bool(value == usual) and isinstance(value, bool) is isinstance(usual, bool)


@cache
def _foreign(kind: type[Body]) -> Mapping[str, tuple[Any, ...]]:
    """The fields that others of its family have and it has not, with what is usual there."""
    family = [other for other in _subclasses(Body) if other.family == kind.family]
    known = CHANGES_NOTHING.union(kind.also_read)
    for other in [kind, *_subclasses(kind)]:  # what decides on a prompt may be asked with all of the request
        known = known.union(other.model_fields, other.unsupported, other.without_effect)
    found: dict[str, tuple[Any, ...]] = {}
    for other in family:
        found.update({name: (False,) for name in other.unsupported if name not in known and name not in found})
        for name, field in other.model_fields.items():
            usual = field.get_default(call_default_factory=True)
            if name not in known:
                found[name] = (*found.get(name, ()), *(() if usual is PydanticUndefined else (usual,)))
    return found


def _subclasses(kind: type[Body]) -> list[type[Body]]:
    return [found for child in kind.__subclasses__() for found in (child, *_subclasses(child))]


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_body(request: Request, model: type[AnyBody], *, keeps: bool = False) -> AnyBody:
    """Of a long body, `Prepared` may stand in fields that are long.

    keeps: a long body will be asked for again.

    Raises InputError for anything that is not a JSON object and ValidationError for one that does not fit.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InputError(f"the content type must be application/json, got {shown(content_type)}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise InputError(f"the content encoding must be identity (none), got {shown(encoding)}")
    raw, engine = await body_bytes(request), request.app.state.service.engine
    most = None if engine is None else most_chars(engine.info.max_model_len)
    if not isinstance(raw, LongBody):
        return await look_into(request, lambda: read(raw, model, request.url.path, most))
    question = Question(name_of(model), request.url.path, most)
    found = await raw.ask(request, question, {"body": _made_again})
    if not keeps:
        raw.close()
    if isinstance(found, Refused):
        raise found.error
    assert isinstance(found, model)
    return found


async def body_bytes(request: Request) -> bytes | LongBody:
    """The whole body, or where it is kept if it is long. Raises OverloadedError if too many are."""
    if not hasattr(request, "_body"):
        request._body = await _receive(request)  # type: ignore[assignment]  # `body` returns it
    return request._body


async def _receive(request: Request) -> bytes | LongBody:
    bodies: LongBodies | None = request.app.state.service.long_bodies
    long: LongBody | None = None
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if long is not None:
            await long.add(part)
            continue
        parts.append(part)
        if bodies is not None and size > LONG_BODY:
            long = await _set_aside(request, bodies, parts)
    if long is not None:
        return long
    raw = parts[0] if len(parts) == 1 else b"".join(parts)
    if bodies is not None and size > LONG and sum(map(raw.count, (b",", b"[", b"{"))) > MANY_VALUES:
        return await _set_aside(request, bodies, parts)
    return raw


async def _set_aside(request: Request, bodies: LongBodies, parts: list[bytes]) -> LongBody:
    long = request.scope[_LONG_BODY] = await bodies.open()
    for part in parts:
        await long.add(part)
    parts.clear()
    return long


async def whole_body(request: Request) -> bytes:
    """The bytes of a body, also of one that is kept."""
    raw = await body_bytes(request)
    return await raw.content(request) if isinstance(raw, LongBody) else raw


class CloseLongBodies:
    """Around the app: however a request ends, its body is kept no longer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        finally:
            if _LONG_BODY in scope:
                scope[_LONG_BODY].close()


async def look_into(request: Request, call: Callable[[], T]) -> T:
    """`call()`, which works out what a body asks for: on a thread if that is long, so that other streams go on."""
    return await on_thread(call) if len(await body_bytes(request)) > LONG else call()


async def on_thread(call: Callable[[], T]) -> T:
    """`call()` on a thread. Threads are few: raises ClientGoneError if nobody waits any more when one is free."""
    gone = is_gone.get()

    def run() -> T:
        if gone():
            raise ClientGoneError
        return call()

    return await asyncio.to_thread(run)


def read(raw: bytes | bytearray, model: type[AnyBody], path: str, most: int | None = None) -> AnyBody:
    """most: characters of a prompt. Raises as `read_body` does."""
    check_shape(raw, most)
    if raw[:1].isspace():
        raw = bytes(raw).strip()
    try:
        data = _fields(raw, model) if len(raw) > LONG else parse(raw, SCHEMAS)
    except (orjson.JSONDecodeError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"the request body must be a JSON object, got {type(data).__name__}")
    if log.isEnabledFor(logging.DEBUG) and (unknown := data.keys() - model.model_fields.keys()):
        log.debug("ignored unknown fields of %s: %s", path, ", ".join(sorted(unknown)))
    return model.model_validate(data)


def _fields(raw: bytes | bytearray | msgspec.Raw, model: type[Body]) -> Any:
    """The fields of a long body, none of them longer than it may be. Raises InputError.

    What nobody reads is left out, with something true in its place.
    """
    if bytes(memoryview(raw)[:1]) != b"{":
        return parse(raw, SCHEMAS)
    found: dict[str, Any] = {}
    for name, value in _FIELDS.decode(raw).items():
        size, most = memoryview(value).nbytes, model.max_bytes.get(name, most_bytes(name))
        is_known = name in model.model_fields or name in model.also_read
        if most is not None and size > most and is_known:
            path = f"{model.within}.{name}" if model.within else name
            raise InputError(f"{path} takes {size} bytes of JSON, and may take {most}", model.within or name)
        inner = model.model_fields[name].annotation if name in model.model_fields else None
        if not is_known and size > LONG:
            found[name] = True
        elif isinstance(inner, type) and issubclass(inner, Body) and size > LONG:
            found[name] = _fields(value, inner)
        else:
            found[name] = parse(value, SCHEMAS.get(name))
    return found


def parse(raw: bytes | bytearray | msgspec.Raw, schemas: Any) -> Any:
    """Long schemas stay text: making objects of one holds up everybody's streams, and here nobody looks into it.

    schemas: where they are: _TEXT, or by key.
    """
    size = memoryview(raw).nbytes
    if size > LONG and schemas and bytes(memoryview(raw)[:1]) == b"{":
        if schemas is _TEXT:
            return JsonText(bytes(raw), "utf-8")
        return {name: parse(value, schemas.get(name)) for name, value in _FIELDS.decode(raw).items()}
    return orjson.loads(memoryview(raw))


# -- bodies that were read elsewhere -----------------------------------------------------------------------------


def name_of(kind: type[Body]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def kind_of(name: str) -> type[Body]:
    """Of the kinds that there are by now."""
    for kind in _subclasses(Body):
        if name_of(kind) == name:
            return kind
    raise KeyError(name)


def taken_apart(value: Any) -> tuple[str, Any]:
    """What of a body that was read is sent: what it says, and not what is usual."""
    if isinstance(value, Body):
        said = value.model_fields_set
        held = {name: item for name, item in {**value.__dict__, **(value.model_extra or {})}.items() if name in said}
        return "body", [name_of(type(value)), held, sorted(said)]
    return long_body.taken_apart(value)


def _made_again(parts: list[Any]) -> Body:
    """It was checked."""
    name, held, said = parts
    return kind_of(name).model_construct(set(said), **held)


_described: list[tuple[type[Body], dict[str, Any]]] = []  # kinds, and where their schemas go


def openapi_body(model: type[Body]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body with `read_body`, whole once `describe_bodies` was called."""
    content: dict[str, Any] = {}
    _described.append((model, content))
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def describe_bodies() -> None:
    """Schemas of all kinds of bodies: a tenth of what a front end computes as it starts, and few look at them."""
    for model, content in _described:
        if "schema" not in content:
            content["schema"] = model.model_json_schema()
