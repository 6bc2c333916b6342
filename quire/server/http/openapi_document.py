"""The server's own OpenAPI document: what FastAPI knows of the routes, and what it cannot see.

Bodies are read by `read_body`, so routes bring their schemas; what these share moves to one place. Every route may
answer with an error of one shape, and some with a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from quire.server.http.body import describe_bodies
from quire.server.http.errors import is_anthropic

Document = dict[str, Any]
_STREAMS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/responses/{response_id}",
    "/inference/v1/generate",
)
_STRING, _NULL = {"type": "string"}, {"type": "null"}
_SCHEMAS = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": _STRING,
                    "type": _STRING,
                    "param": {"anyOf": [_STRING, _NULL]},
                    "code": {"anyOf": [{"type": "integer"}, _STRING, _NULL]},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _STRING, "message": _STRING},
            },
        },
    },
}


def openapi_document(app: FastAPI) -> Callable[[], Document]:
    """For `app.openapi`: the document, made when it is first asked for."""

    def document() -> Document:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    return document


def _document(app: FastAPI) -> Document:
    describe_bodies()
    made: Document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    shared = dict(_SCHEMAS)
    for path, operations in made["paths"].items():
        for operation in operations.values():
            if "requestBody" in operation:
                operation["requestBody"] = _lifted(operation["requestBody"], shared)
            operation["responses"] = _responses(path, operation["responses"])
    made["components"] = {"schemas": shared}
    return made


def _lifted(node: Any, shared: Document) -> Any:
    """`node` with its `$defs` moved to `shared`, and references pointing there."""
    if isinstance(node, list):
        return [_lifted(item, shared) for item in node]
    if not isinstance(node, dict):
        return node
    for name, definition in node.get("$defs", {}).items():
        shared[name] = _lifted(definition, shared)
    found = {key: _lifted(value, shared) for key, value in node.items() if key != "$defs"}
    reference = found.get("$ref")
    if isinstance(reference, str):
        found["$ref"] = reference.replace("#/$defs/", "#/components/schemas/")
    return found


def _responses(path: str, responses: Document) -> Document:
    found = {status: answer for status, answer in responses.items() if status != "422"}  # said as 400 here
    if path in _STREAMS:
        found["200"].setdefault("content", {})["text/event-stream"] = {"schema": _STRING}
    kind = "AnthropicError" if is_anthropic(path) else "Error"
    schema = {"schema": {"$ref": f"#/components/schemas/{kind}"}}
    found["default"] = {"description": "What is wrong, and with which field", "content": {"application/json": schema}}
    return found
