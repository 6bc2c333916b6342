"""Calls as a JSON list of {"name", "parameters"}: how a model is made to call whose own format has no grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from quire.parsers.base import Parser
from quire.parsers.layouts.json_calls import JsonCalls
from quire.parsers.layouts.structural import CALLS_BACKEND, schema_of
from quire.types.reply import Tool
from quire.types.structured import GrammarSpec

_LAYOUT = JsonCalls(openings=("[",), is_list=True)


class CallListFormat:
    needs_special_tokens: ClassVar[bool] = False

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> Parser:
        return _LAYOUT.parser(tools, parallel=parallel)

    def constraint(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> GrammarSpec | None:
        """A list of at least one call. None unless calls are required: text cannot be told from a list."""
        if not required:
            return None
        items: list[object] = []
        definitions: dict[str, Any] = {}
        for number, tool in enumerate(tools):
            parameters, more = _embedded(schema_of(tool), f"tool{number}")
            definitions |= more
            items.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": tool.name}, "parameters": parameters},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        schema: dict[str, object] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
        if definitions:
            schema["$defs"] = definitions
        if not parallel:
            schema["maxItems"] = 1
        return GrammarSpec("json_schema", json.dumps(schema, separators=(",", ":"), ensure_ascii=False), CALLS_BACKEND)


CALL_LIST = CallListFormat()


def _embedded(schema: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema as a part of a larger one, and the definitions that its references now need at the root."""
    places = ("$defs", "definitions")

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {k: target(v) if k == "$ref" and isinstance(v, str) else moved(v) for k, v in value.items()}

    def target(pointer: str) -> str:
        _, _, path = pointer.partition("#/")
        place, _, rest = path.partition("/")
        if not pointer.startswith("#"):
            return pointer
        return f"#/$defs/{name}.{rest}" if place in places else f"#/$defs/{name}{pointer[1:]}"

    definitions = {f"{name}.{key}": moved(v) for place in places for key, v in (schema.get(place) or {}).items()}
    plain = {key: moved(value) for key, value in schema.items() if key not in places}
    if '"$ref"' in json.dumps(schema):
        definitions[name] = plain
        return {"$ref": f"#/$defs/{name}"}, definitions
    return plain, {}
