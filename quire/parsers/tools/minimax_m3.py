"""MiniMax-M3: arguments as nested tags, each behind a prefix that no text has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.parsers.arguments import ArgumentWriter
from quire.parsers.calls import PieceBuilder
from quire.parsers.json_text import MAX_DEPTH, dumps, escape
from quire.parsers.layouts.bare_values import LIST_TIES, fields_of, string_part
from quire.parsers.layouts.json_calls import Ending
from quire.parsers.layouts.marked import MarkedFormat, Section
from quire.parsers.layouts.structural import (
    Part,
    TextAndCalls,
    either,
    json_value,
    literal,
    optional,
    repeat,
    schema_of,
    sequence,
    tag,
)
from quire.parsers.scanner import LINE, Markers, Scanner, Step
from quire.parsers.typed import STRING, json_of, resolve, types_of
from quire.types.reply import Tool

_PREFIX = "]<]minimax[>["
_SECTION, _SECTION_END = f"{_PREFIX}<tool_call>", f"{_PREFIX}</tool_call>"
_CALL, _CALL_END = f'{_PREFIX}<invoke name="', f"{_PREFIX}</invoke>"
_IN_SECTION = Markers([_CALL, _SECTION_END])
_NAME = re.compile(r'[^<>"\n]*')
_NAME_END = Markers(['">'])
_TAG = Markers([f"{_PREFIX}<"])
_TAG_END = Markers([">"])
_MAX_DEPTH = 12  # of a schema; recursive ones have no grammar here

Schema = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _MiniMaxM3(MarkedFormat):
    def read_section(
        self, scanner: Scanner, pieces: PieceBuilder, opening: str, tools: Sequence[Tool]
    ) -> Step[Section]:
        del opening
        calls = 0
        while True:
            yield from scanner.skip_space()
            if calls:
                scanner.begin(scanner.pos)
            marker = yield from scanner.marker(_IN_SECTION)
            if marker != _CALL:
                return Section(calls, closed=marker is not None)
            ending = yield from _read_call(scanner, pieces, tools)
            calls += ending is not Ending.NONE
            if ending is not Ending.WHOLE:
                return Section(calls, broken=ending is Ending.NONE)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> TextAndCalls | None:
        calls = []
        for tool in tools:
            root = schema_of(tool)
            arguments = _Elements(root).of_object(root, 0)
            if arguments is None:
                return None
            calls.append(tag(f'{_CALL}{tool.name}">', arguments, f"{_CALL_END}\n"))
        return TextAndCalls(
            calls=calls, begin=f"{_SECTION}\n", end=_SECTION_END, triggers=[_SECTION], parallel=parallel
        )


@dataclass(frozen=True, slots=True)
class _Elements:
    """The grammars of values under the schema `root`: tags on every level, text in the innermost."""

    root: Schema

    def of_object(self, schema: Schema, depth: int) -> Part | None:
        """One element for each property. None if no grammar can hold it."""
        fields = fields_of(schema, self.root)
        if fields is None:
            return None
        parts = []
        for key, one, _, is_needed in fields:
            element = self._element(key, one, depth + 1)
            if element is None:
                return None
            parts.append(element if is_needed else optional(element))
        return sequence(*parts) if parts else literal("")

    def _element(self, key: str, schema: object, depth: int) -> Part | None:
        """An element in all the ways that its value may be written."""
        values = self._values(resolve(schema, self.root), depth)
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return either([tag(f"{_PREFIX}<{key}>", value, f"{_PREFIX}</{key}>") for value in known])

    def _values(self, schema: Schema, depth: int) -> list[Part | None]:
        if depth > _MAX_DEPTH:
            return [None]
        variants = schema.get("anyOf") or schema.get("oneOf")
        if "enum" in schema or "const" in schema:
            constants = schema.get("enum", [schema.get("const")])
            return [literal(value if isinstance(value, str) else dumps(value)) for value in constants]
        if isinstance(variants, list):
            return [value for one in variants for value in self._values(resolve(one, self.root), depth + 1)]
        return [self._typed(kind, schema, depth) for kind in sorted(types_of(schema, self.root))]

    def _typed(self, kind: str, schema: Schema, depth: int) -> Part | None:
        if kind == "string":
            return string_part(schema, _PREFIX)
        if kind == "object":
            return self.of_object(schema, depth)
        if kind == "array":
            return self._list(schema, depth)
        return json_value({**schema, "type": kind})

    def _list(self, schema: Schema, depth: int) -> Part | None:
        item = self._element("item", schema.get("items"), depth + 1)
        if item is None or LIST_TIES & schema.keys():
            return None
        return repeat(item, schema.get("minItems", 0), schema.get("maxItems"))


def _read_call(scanner: Scanner, pieces: PieceBuilder, tools: Sequence[Tool]) -> Step[Ending]:
    head = yield from scanner.head(_NAME, _NAME_END)
    if head is None or not head[0]:
        return Ending.NONE
    yield from scanner.skip_space()
    name = yield from _read_tag(scanner)
    if name is None:
        return Ending.NONE
    writer = ArgumentWriter(pieces, tools, head[0])
    while name != "/invoke":
        if name is None or name.startswith("/"):
            return Ending.CUT
        writer.key(name)
        if not (yield from _Value(writer, scanner).read(name, writer.schema(name), 0)):
            return Ending.CUT
        yield from scanner.skip_space()
        name = yield from _read_tag(scanner)
    writer.end()
    return Ending.WHOLE


def _read_tag(scanner: Scanner) -> Step[str | None]:
    """Reads a tag: its name, with the slash if it closes. None if none is next."""
    if (yield from scanner.marker(_TAG)) is None:
        return None
    return (yield from _read_tag_name(scanner))


def _read_tag_name(scanner: Scanner) -> Step[str | None]:
    head = yield from scanner.head(LINE, _TAG_END)
    return head[0] or None if head is not None else None


@dataclass(frozen=True, slots=True)
class _Value:
    """Reads the values of one call: text up to the closing tag, or tags inside."""

    writer: ArgumentWriter
    scanner: Scanner

    def read(self, name: str, schema: object, depth: int) -> Step[bool]:
        """From behind the opening tag `name` to behind the closing one."""
        root = self.writer.root
        types = types_of(schema, root)
        parts: list[str] = []
        is_string = types == STRING
        if is_string:
            self.writer.emit('"')
        emit = (lambda text: self.writer.emit(escape(text))) if is_string else parts.append
        if (yield from self.scanner.pass_until(_TAG, emit)) is None:
            return False
        tag_name = yield from _read_tag_name(self.scanner)
        if tag_name == f"/{name}":
            self.writer.emit('"' if is_string else _scalar("".join(parts), types))
            return True
        if tag_name is None or is_string or "".join(parts).strip() or depth >= MAX_DEPTH:
            return False
        is_list = "array" in types and ("object" not in types or tag_name == "item")
        return (yield from self._read_children(name, tag_name, _variant(schema, root, is_list), is_list, depth + 1))

    def _read_children(self, name: str, first: str, schema: Schema, is_list: bool, depth: int) -> Step[bool]:
        child: str | None = first
        properties = schema.get("properties")
        is_empty = True
        self.writer.emit("[" if is_list else "{")
        while child != f"/{name}":
            if child is None or child.startswith("/"):
                return False
            self.writer.emit("" if is_empty else ", ")
            is_empty = False
            if is_list:
                of_child = schema.get("items")
            else:
                self.writer.emit(f"{dumps(child)}: ")
                of_child = properties.get(child) if isinstance(properties, dict) else None
            if not (yield from self.read(child, of_child, depth)):
                return False
            yield from self.scanner.skip_space()
            child = yield from _read_tag(self.scanner)
        self.writer.emit("]" if is_list else "}")
        return True


def _scalar(text: str, types: frozenset[str]) -> str:
    if not text.strip() and not types & STRING:
        if "array" in types:
            return "[]"
        if "object" in types:
            return "{}"
    return json_of(text, types)


def _variant(schema: object, root: Schema, is_list: bool) -> Schema:
    """Of the alternatives in `schema` the one that describes a list, or an object."""
    schema = resolve(schema, root)
    for word in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(word, ()):
            if ("array" if is_list else "object") in types_of(one, root):
                return resolve(one, root)
    return schema


MINIMAX_M3 = _MiniMaxM3(openings=(_SECTION,), closings=(_SECTION_END,))
