"""Grammars of arguments that are written one by one as bare text: strings as they are, all other values as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.parsers.json_text import dumps
from quire.parsers.layouts.structural import (
    Part,
    either,
    json_value,
    literal,
    optional,
    regex,
    schema_of,
    sequence,
    tag,
    text_without,
)
from quire.parsers.typed import STRING, resolve, types_of
from quire.types.reply import Tool

Schema = Mapping[str, Any]
_MAX_FIRST = 24  # optional arguments of which each may be the first: the grammar grows with their square
# Of each format a part, in which nothing needs escapes.
_FORMATS = {
    "duration": "P(T[0-9]{1,4}[HMS]|[0-9]{1,4}D(T[0-9]{1,2}H)?)",
    "email": r"[a-z0-9_+\-]{1,32}(\.[a-z0-9_+\-]{1,16})*@[a-z0-9]{1,32}(\.[a-z0-9]{1,16})+",
    "hostname": r"[a-z0-9]{1,32}(\.[a-z0-9]{1,32})*",
    "ipv4": r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(\.(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])){3}",
    "ipv6": "[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}",
    "uri": r"[a-z]{2,12}:(//)?[A-Za-z0-9_~/?=&+,;@.\-]{1,2048}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
# Words at the top of a tool's schema that tie arguments to each other: no grammar of single arguments can hold them.
_TIES = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "minProperties", "maxProperties"))
LIST_TIES = frozenset(("prefixItems", "contains", "uniqueItems"))  # … the items of a list
_TIES |= {"dependentRequired", "dependentSchemas", "dependencies", "propertyNames", "patternProperties"}


@dataclass(frozen=True, kw_only=True)
class ArgumentTags:
    """How an argument is written: begin KEY begin_end value end."""

    begin: str
    begin_end: str
    end: str
    line: str = ""  # behind an argument
    padding: str = ""  # around the value
    has_types: bool = False  # DSML: an attribute behind the key says whether the value is a string


def argument_list(tool: Tool, tags: ArgumentTags) -> Part | None:
    """All arguments of `tool` in the order of its schema. None if no such grammar can hold the schema."""
    parts = []
    for key, schema, root, needed in arguments_of(tool) or ():
        part = _argument(key, schema, root, tags)
        if part is None:
            return None
        parts.append(part if needed else optional(part))
    if arguments_of(tool) is None:
        return None
    return sequence(*parts) if parts else literal("")


def arguments_of(tool: Tool) -> list[tuple[str, Schema, Schema, bool]] | None:
    """(name, schema, the schema that references point into, whether it is required). None if they are tied together."""
    root = schema_of(tool)
    return fields_of(root, root)


def fields_of(schema: Schema, root: Schema) -> list[tuple[str, Schema, Schema, bool]] | None:
    """The same of any object."""
    schema = resolve(schema, root)
    if _TIES & schema.keys():
        return None
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    return [
        *((key, resolve(one, root), root, key in required) for key, one in properties.items()),
        *((key, {}, root, True) for key in required if key not in properties),
    ]


def separated(needed: Sequence[Part], others: Sequence[Part], separator: str) -> Part | None:
    """All of `needed` and any of `others` after them, with separators between. None if that is too large a grammar."""
    rest = [optional(sequence(literal(separator), other)) for other in others]
    if needed:
        joined = [part for value in needed for part in (literal(separator), value)][1:]
        return sequence(*joined, *rest)
    if len(others) > _MAX_FIRST:
        return None
    # Each may be the first.
    first = [sequence(other, *rest[index + 1 :]) for index, other in enumerate(others)]
    return optional(either(first)) if first else literal("")


def with_definitions(schema: Schema, root: Schema) -> Part:
    """A property's schema by itself: the definitions that it may refer to go along."""
    return {**schema, **{word: root[word] for word in ("$defs", "definitions") if word in root}}


def _argument(key: str, schema: Schema, root: Schema, tags: ArgumentTags) -> Part | None:
    begin = f"{tags.begin}{key}"
    variants = []
    for is_string, part in _values(schema, root, tags.end):
        if part is None:
            return None
        kind = f'" string="{"true" if is_string else "false"}">' if tags.has_types else tags.begin_end
        variants.append(tag(begin + kind + tags.padding, part, tags.padding + tags.end + tags.line))
    return either(variants) if variants else None


def _values(schema: Schema, root: Schema, end: str) -> Iterator[tuple[bool, Part | None]]:
    """The ways to write a value: (it is a string, the part); None for one that no grammar can hold."""
    types = types_of(schema, root)
    if "enum" in schema or "const" in schema:
        for value in schema.get("enum", [schema.get("const")]):
            yield isinstance(value, str), literal(value if isinstance(value, str) else dumps(value))
        return
    if types == STRING:
        yield True, string_part(schema, end)
        return
    variants = schema.get("anyOf") or schema.get("oneOf")
    if "string" in types and isinstance(variants, list):
        for variant in variants:
            yield from _values(resolve(variant, root), root, end)
        return
    if "string" in types:
        yield True, string_part(schema, end)
        rest = sorted(types - STRING)
        yield False, json_value(with_definitions({**schema, "type": rest}, root))
        return
    yield False, json_value(with_definitions(schema, root))


def string_part(schema: Schema, end: str) -> Part | None:
    """A string as bare text, up to `end`. None for a pattern that could write the end, or has bounds beside it."""
    pattern = schema.get("pattern") or _FORMATS.get(schema.get("format", ""))
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    if pattern:
        is_safe = not re.search(rf"{re.escape(end[0])}|(?<!\\)\.|\[\^|\\[SWDpPux]", pattern)
        return regex(pattern) if is_safe and not shortest and longest is None else None
    if not shortest:
        return text_without(end, max_chars=longest)
    # The first characters are counted one by one, so they must not begin the end.
    first = regex(f"[^{_in_class(end[0])}]{{{shortest}}}")
    return sequence(first, text_without(end, max_chars=None if longest is None else longest - shortest))


def _in_class(char: str) -> str:
    return {"\n": "\\n", "]": "\\]", "\\": "\\\\", "^": "\\^"}.get(char, char)
