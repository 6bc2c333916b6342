"""Every refusal in the shape that the clients of its path expect.

OpenAI's everywhere: {"error": {"message", "type", "param", "code"}}, where code is the HTTP status. Under /v1/messages
Anthropic's: {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from quire.foundation.error_codes import entry_of
from quire.foundation.errors import EngineDeadError, InputError, OverloadedError, QuireError
from quire.foundation.log import get_logger
from quire.foundation.shown import clipped, shown
from quire.server.http.trail import trail_of

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    507: "InsufficientStorageError",
}
# Entries of the catalogue (docs/errors.md), where an error's own class does not say it: in the header x-error-code.
CODES = {
    400: "bad-field",
    401: "unauthorized",
    404: "not-found",
    405: "not-found",
    408: "too-slow",
    413: "too-large",
    431: "too-large",
    501: "not-supported",
    503: "overloaded",
    507: "no-room",
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    529: "overloaded_error",
}
ANTHROPIC_OVERLOADED = 529  # where others say 503
RETRY_SECONDS = "1"
log = get_logger(__name__)
CLIENT_GONE = 499
MAX_MESSAGE = 1024  # characters, whatever of a request it repeats
MAX_PARAM = 256  # characters of the name of a field

_EXPECTED, _MISSING = "Input should be ", "Field required"  # how pydantic says it


class ApiError(Exception):
    """A request that is answered with `status` and the error shape.

    details: what Anthropic's clients read as `error.details`. retry_after: seconds, said with a 503.
    kind: another type than the status has.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        details: Mapping[str, Any] | None = None,
        retry_after: int | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after
        self.status = status
        self.message = message
        self.param = param
        self.details = details


class ClientGoneError(Exception):
    """Nobody waits for the answer any more: what it takes is not done."""


class NotStoredError(ApiError):
    """A stored response is not here. Another front end of the server may have it."""

    def __init__(self, response_id: str, param: str) -> None:
        super().__init__(404, f"there is no stored response with the id {response_id[:256]!r}", param)
        self.response_id = response_id


def error_body(
    status: int,
    message: str,
    param: str | None = None,
    path: str = "",
    details: Mapping[str, Any] | None = None,
    kind: str | None = None,
) -> bytes:
    message, param = clipped(message, MAX_MESSAGE), None if param is None else clipped(param, MAX_PARAM)
    if is_anthropic(path):
        more = {} if details is None else {"details": details}
        return orjson.dumps({"type": "error", "error": {**anthropic_error(status, message), **more}})
    kind = kind or TYPES.get(status) or HTTPStatus(status).phrase.replace(" ", "") + "Error"
    if "/v1/responses" in path and status in (400, 404):
        kind = "invalid_request_error"
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def is_anthropic(path: str) -> bool:
    """Whether the clients of this path are Anthropic's."""
    return "/v1/messages" in path


def asks_as_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether one of Anthropic's clients asks for models, whose path OpenAI's clients share: they name a version."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def path_of(scope: Scope) -> str:
    """The path whose clients understand the reply to this request."""
    path: str = scope["path"]
    return "/v1/messages" if "/v1/models" in path and asks_as_anthropic(scope) else path


def anthropic_error(status: int, message: str) -> dict[str, str]:
    return {
        "type": ANTHROPIC_TYPES.get(anthropic_status(status), "api_error"),
        "message": clipped(message, MAX_MESSAGE),
    }


def anthropic_status(status: int) -> int:
    return ANTHROPIC_OVERLOADED if status == 503 else status


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    path: str = "",
    details: Mapping[str, Any] | None = None,
    kind: str | None = None,
) -> Response:
    headers = {"x-error-code": CODES.get(status, "internal"), **(headers or {})}
    if status == 503:
        headers.setdefault("retry-after", RETRY_SECONDS)
    body = error_body(status, message, param, path, details, kind)
    return Response(body, anthropic_status(status) if is_anthropic(path) else status, headers, "application/json")


def explain(error: BaseException) -> tuple[int, str, str | None]:
    """HTTP status, message and field of any exception that serving a request can raise, none of them long."""
    status, message, param = _explain(error)
    return status, clipped(message, MAX_MESSAGE), None if param is None else clipped(param, MAX_PARAM)


def _explain(error: BaseException) -> tuple[int, str, str | None]:
    if isinstance(error, ApiError):
        return error.status, error.message, error.param
    if isinstance(error, InputError):
        return 400, error.message, error.param
    if isinstance(error, ValidationError):
        return 400, *explain_validation(error)
    if isinstance(error, OverloadedError):
        return 503, str(error), None
    if isinstance(error, EngineDeadError):
        return 503, f"the engine has stopped: {error}", None
    return 500, "internal error; the server's log has the details", None


def explain_validation(error: ValidationError) -> tuple[str, str | None]:
    """One sentence a field. A union reports one error a branch: they are joined with "or"."""
    by_field: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    for item in error.errors(include_url=False):
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, InputError):  # raised by a validator of ours
            return cause.message, cause.param
        field = str(item["loc"][0]) if item["loc"] else "body"
        by_field.setdefault(field, []).append(item["msg"])
        values[field] = item["input"]
    sentences = []
    for field, messages in by_field.items():
        wanted = " or ".join(dict.fromkeys(message.removeprefix(_EXPECTED) for message in messages))
        if messages == [_MISSING]:  # what it is missing in is the whole request
            sentences.append(f"{field} is required")
        elif messages[0].startswith(_EXPECTED):
            sentences.append(f"{field}: expected {wanted}, got {shown(values[field])}")
        else:
            sentences.append(f"{field}: {wanted}, got {shown(values[field])}")
    return "; ".join(sentences), next(iter(by_field))


def install(app: FastAPI) -> None:
    """Map every exception of the app to the error shape."""

    async def known(request: Request, error: Exception) -> Response:
        details, seconds, kind = None, None, None
        if isinstance(error, ApiError):
            details, seconds, kind = error.details, error.retry_after, error.kind
        headers = {} if seconds is None else {"retry-after": str(seconds)}
        if isinstance(error, QuireError):
            headers["x-error-code"] = entry_of(error).code
        trail_of(request.scope).fail(explain(error)[1])
        return error_response(*explain(error), headers=headers, path=path_of(request.scope), details=details, kind=kind)

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)  # nobody reads it

    async def unknown(request: Request, error: Exception) -> Response:
        trail_of(request.scope).fail(type(error).__name__)
        # The server logs the exception and closes the connection: the client must not send its next request there.
        return error_response(*explain(error), headers={"connection": "close"}, path=request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"there is no {request.url.path}",
            405: f"{request.method} is not allowed on {request.url.path}",
        }.get(error.status_code, str(error.detail))
        return error_response(error.status_code, message, None, error.headers, request.url.path)

    async def left(request: Request, _error: Exception) -> Response:
        log.info("%s %s: the client left before its body was complete", request.method, request.url.path)
        return Response(status_code=400)  # nobody reads it

    async def query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = str(first["loc"][-1])
        return error_response(
            400, f"{field}: {first['msg']}, got {shown(first['input'])}", field, path=request.url.path
        )

    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(RequestValidationError, query)
    for kind in (ApiError, InputError, ValidationError, EngineDeadError, OverloadedError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, unknown)
