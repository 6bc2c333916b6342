"""From the bytes of a request body to a checked model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ConfigDict, model_validator

from quire.foundation.errors import InputError
from quire.foundation.log import get_logger
from quire.server.limits import check_depth

log = get_logger(__name__)
BIG_BODY = 16 * 1024  # bytes
T = TypeVar("T")


class Body(BaseModel):
    """Base of all request bodies: exact types, `null` means "not given", unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())
    unsupported: ClassVar[tuple[str, ...]] = ()  # fields that would change the answer: not to be dropped silently

    @model_validator(mode="before")
    @classmethod
    def _read_given(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in cls.unsupported:
            if data.get(name):
                raise InputError(f"{name} is not supported by this version", name)
        return {key: value for key, value in data.items() if value is not None}


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_body(request: Request, model: type[AnyBody]) -> AnyBody:
    """Raises InputError for anything that is not a JSON object and ValidationError for one that does not fit."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InputError(f"the content type must be application/json, got {content_type!r}")
    raw = await request.body()
    return await look_into(request, lambda: _read(raw, model, request.url.path))


async def look_into(request: Request, call: Callable[[], T]) -> T:
    """`call()`, which works out what a body asks for: on a thread if that is long, so that other streams go on."""
    return await asyncio.to_thread(call) if len(await request.body()) > BIG_BODY else call()


def _read(raw: bytes, model: type[AnyBody], path: str) -> AnyBody:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InputError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"the request body must be a JSON object, got {type(data).__name__}")
    check_depth(raw, data)
    if log.isEnabledFor(logging.DEBUG) and (unknown := data.keys() - model.model_fields.keys()):
        log.debug("ignored unknown fields of %s: %s", path, ", ".join(sorted(unknown)))
    return model.model_validate(data)


def openapi_body(model: type[Body]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body with `read_body`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}
