"""Short texts that grammars allow: what an answer that must end can be closed with.

They are candidates, each tried against the grammar before it is used; so they need not be right, only likely.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

from quire.grammar.tags import Format

_MAX_DEPTH = 8  # of references that are followed
_MAX_REPEAT = 64
_FORMAT_EXAMPLES = {
    "duration": "P1D",
    "email": "a@b.cc",
    "hostname": "a",
    "ipv4": "1.1.1.1",
    "ipv6": "::1",
    "uri": "a:b",
    "uuid": "00000000-0000-0000-0000-000000000000",
}


def values(schema: Any) -> Iterator[str]:
    """JSON texts: the smallest value of each schema within `schema`, itself first, with its key if it has one."""
    yield from _values(schema, schema, "", 0)


def _values(root: Any, schema: Any, key: str, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth > 2 * _MAX_DEPTH:
        return
    yield key + _smallest(root, schema, 0)
    for value in schema.get("enum", ()):
        yield key + _json(value)
    for place in ("properties", "patternProperties", "$defs", "definitions"):
        for name, sub in schema.get(place, {}).items():
            yield from _values(root, sub, f"{_json(name)}:" if place == "properties" else "", depth + 1)
    for place in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for sub in schema.get(place, ()):
            yield from _values(root, sub, key, depth + 1)
    for place in ("items", "additionalProperties"):
        yield from _values(root, schema.get(place), "", depth + 1)


def _smallest(root: Any, schema: Any, depth: int) -> str:
    """One value's text. Where a reference goes round in circles, null."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return "null"
    if "const" in schema:
        return _json(schema["const"])
    if "enum" in schema:
        return min(map(_json, schema["enum"]), key=len)
    if "$ref" in schema:
        return _smallest(root, _target(root, schema["$ref"]), depth + 1)
    for place in ("anyOf", "oneOf"):
        branches = [{} if sub is True else sub for sub in schema.get(place) or () if sub is not False]
        if branches:
            return min((_smallest(root, {**schema, place: None, **sub}, depth + 1) for sub in branches), key=len)
    if schema.get("allOf"):
        return _smallest(root, _merged(root, schema), depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object" or (kind is None and ("properties" in schema or "required" in schema)):
        properties = schema.get("properties", {})
        members = [f"{_json(n)}:{_smallest(root, properties.get(n), depth + 1)}" for n in schema.get("required", ())]
        return "{" + ",".join(members) + "}"
    if kind == "array":
        prefix, count = schema.get("prefixItems", []), min(int(schema.get("minItems", 0)), _MAX_REPEAT)
        items = [prefix[i] if i < len(prefix) else schema.get("items") for i in range(count)]
        return "[" + ",".join(_smallest(root, item, depth + 1) for item in items) + "]"
    if kind == "string":
        return _json(_string(schema))
    if kind in ("integer", "number"):
        return _number(schema)
    return "true" if kind == "boolean" else "null"


def _merged(root: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """A schema and the parts of its allOf as one, as far as objects go."""
    found = {name: value for name, value in schema.items() if name != "allOf"}
    for part in schema["allOf"]:
        part = _target(root, part["$ref"]) if isinstance(part, dict) and "$ref" in part else part
        if not isinstance(part, dict):
            continue
        part = _merged(root, part) if "allOf" in part else part
        both: dict[str, Any] = {"properties": {**found.get("properties", {}), **part.get("properties", {})}}
        both["required"] = [*found.get("required", ()), *part.get("required", ())]
        found = {**found, **part, **both}
    return found


def _string(schema: dict[str, Any]) -> str:
    if "pattern" in schema:
        return match_of(schema["pattern"]) or ""
    if schema.get("format") in _FORMAT_EXAMPLES:
        return _FORMAT_EXAMPLES[schema["format"]]
    return "a" * min(int(schema.get("minLength", 0)), _MAX_REPEAT)


def _number(schema: dict[str, Any]) -> str:
    for name, step in (("minimum", 0), ("maximum", 0), ("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        bound = schema.get(name)
        if bound is not None:
            return _json(bound + step)
    return "0"


def _target(root: Any, reference: str) -> Any:
    found = root
    for key in reference.lstrip("#").split("/")[1:]:
        try:
            found = found[int(key)] if isinstance(found, list) else found[key.replace("~1", "/").replace("~0", "~")]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return found


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# Regular expressions


def match_of(pattern: str) -> str | None:
    """A short text that the pattern matches as a whole; None if Python cannot read it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from re import _parser  # type: ignore[attr-defined]

            return _text(_parser.parse(pattern))
        except (re.error, OverflowError, RecursionError):
            return None


def _text(parsed: Any) -> str:
    found = []
    for name, value in parsed:
        match str(name):
            case "LITERAL":
                found.append(chr(value))
            case "NOT_LITERAL":
                found.append("b" if value == ord("a") else "a")
            case "ANY":
                found.append("a")
            case "IN":
                found.append(_member(value))
            case "BRANCH":
                found.append(min((_text(branch) for branch in value[1]), key=len))
            case "SUBPATTERN":
                found.append(_text(value[3]))
            case "MAX_REPEAT" | "MIN_REPEAT":
                found.append(_text(value[2]) * min(int(value[0]), _MAX_REPEAT))
            case "AT":
                pass
            case _:
                raise re.error(f"no short text is known for {name}")
    return "".join(found)


def _member(items: Any) -> str:
    """A character of a class."""
    chosen = ""
    for name, value in items:
        match str(name):
            case "NEGATE":
                inside = re.compile(_source_of(items[1:]))
                return next(c for c in "a0 -_.A~é€" if not inside.match(c))
            case "LITERAL":
                chosen = chosen or chr(value)
            case "RANGE":
                chosen = chosen or chr(value[0])
            case "CATEGORY":
                chosen = chosen or {"DIGIT": "0", "WORD": "a", "SPACE": " "}.get(str(value).rpartition("_")[2], "-")
    return chosen


def _source_of(items: Any) -> str:
    """The class again as a pattern."""
    codes = {"DIGIT": r"\d", "WORD": r"\w", "SPACE": r"\s"}
    parts = []
    for name, value in items:
        match str(name):
            case "LITERAL":
                parts.append(re.escape(chr(value)))
            case "RANGE":
                parts.append(f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}")
            case "CATEGORY":
                parts.append(codes.get(str(value).rpartition("_")[2], ""))
    return f"[{''.join(parts)}]"


# Structural tags


def parts(tag: Format) -> Iterator[str]:
    """What may be due within a tag: its fixed texts, and the smallest values of its schemas."""
    for name in ("begin", "value", "separator"):
        if tag.get(name):
            yield tag[name]
    yield from tag.get("end", ())
    if "json_schema" in tag:
        yield from values(tag["json_schema"])
    if "pattern" in tag:
        yield match_of(tag["pattern"]) or ""
    for name in ("elements", "tags"):
        for sub in tag.get(name, ()):
            yield from parts(sub)
    if "content" in tag:
        yield from parts(tag["content"])
