"""Arguments that are written as bare text: the JSON value that the tool's schema makes of it."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.parsers.json_text import dumps, loads
from quire.types.reply import Tool

Schema = Mapping[str, Any]
TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
STRING = frozenset(("string",))
NULLABLE_STRING = frozenset(("string", "null"))
_NULLS = ("null", "none")
_MAX_HOPS = 16  # through references and unions
_INTEGER = re.compile(r"[+-]?[0-9]+")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_OF_VALUE = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def properties_of(tools: Sequence[Tool], name: str) -> tuple[Schema, Schema]:
    """The schema of the function `name` (empty if it is unknown) and, of that, the properties."""
    root: Schema = next((tool.parameters or {} for tool in tools if tool.name == name), {})
    schema = resolve(root, root)
    properties = schema.get("properties")
    return root, properties if isinstance(properties, dict) else {}


def resolve(schema: object, root: Schema) -> Schema:
    """`schema` with a reference followed to where it points in `root`; {} (anything) if it points nowhere."""
    for _ in range(_MAX_HOPS):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target: object = root
        for key in reference.removeprefix("#").split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        schema = target
    return {}


def types_of(schema: object, root: Schema, hops: int = _MAX_HOPS) -> frozenset[str]:
    """The JSON types that a value may have; a string if the schema does not say."""
    found = _types(resolve(schema, root), root, hops)
    return found or STRING


def _types(schema: Schema, root: Schema, hops: int) -> frozenset[str]:
    if hops <= 0:
        return frozenset()
    found: set[str] = set()
    named = schema.get("type")
    if isinstance(named, str):
        found.add(named)
    elif isinstance(named, list):
        found.update(one for one in named if isinstance(one, str))
    elif "enum" in schema or "const" in schema:
        found.update("null" if one is None else _OF_VALUE.get(type(one), "string") for one in _choices(schema))
    else:
        for word in ("anyOf", "oneOf", "allOf"):
            variants = schema.get(word)
            for variant in variants if isinstance(variants, list) else ():
                found |= _types(resolve(variant, root), root, hops - 1)
        if not found and "properties" in schema:
            found.add("object")
        if not found and "items" in schema:
            found.add("array")
    if schema.get("nullable") is True:
        found.add("null")
    return frozenset(found & TYPES)


def _choices(schema: Schema) -> list[object]:
    choices = schema.get("enum", [schema.get("const")])
    return choices if isinstance(choices, list) else []


def is_choice(text: str, schema: object, root: Schema) -> bool:
    """Whether `text` is one of the strings that an enum or a const names."""
    schema = resolve(schema, root)
    return ("enum" in schema or "const" in schema) and text in _choices(schema)


def is_null_so_far(text: str) -> bool:
    """Whether `text` may still become null, as json_of takes it."""
    return any(null.startswith(text.strip().lower()) for null in _NULLS)


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON text of what was written as `text`: the first of the types that fits, a string if none does."""
    bare = text.strip()
    for kind in ("null", "boolean", "integer", "number"):
        if kind in types:
            value = _SCALARS[kind](bare)
            if value is not None:
                return value
    if "object" in types or "array" in types:
        value = _container(bare)
        if value is not None:
            return value
    if "string" not in types:
        try:
            loads(bare)
        except ValueError:
            pass
        else:
            return bare
    return dumps(text)


def _null(text: str) -> str | None:
    return "null" if text.lower() in _NULLS else None


def _boolean(text: str) -> str | None:
    return text.lower() if text.lower() in ("true", "false") else None


def _integer(text: str) -> str | None:
    if _INTEGER.fullmatch(text):
        sign = "-" if text.startswith("-") else ""
        return sign + (text.lstrip("+-0") or "0")
    number = _number(text)
    return number if number is not None and float(number).is_integer() else None


def _number(text: str) -> str | None:
    if _JSON_NUMBER.fullmatch(text):
        return text
    try:
        number = float(text)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None


_SCALARS = {"null": _null, "boolean": _boolean, "integer": _integer, "number": _number}


def _container(text: str) -> str | None:
    """A list or an object, as JSON or as Python writes it."""
    if text[:1] not in ("{", "["):
        return None
    try:
        loads(text)
    except ValueError:
        pass
    else:
        return text
    try:
        return dumps(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
