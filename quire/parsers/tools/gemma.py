"""FunctionGemma and Gemma 4: call:NAME{k:v,…}, strings between markers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quire.parsers.arguments import ArgumentWriter
from quire.parsers.calls import PieceBuilder
from quire.parsers.json_text import dumps
from quire.parsers.layouts.bare_values import LIST_TIES, fields_of, separated, string_part
from quire.parsers.layouts.marked import NOT_A_CALL, MarkedFormat, Section
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
from quire.parsers.literals import Literals
from quire.parsers.scanner import Markers, Scanner, Step
from quire.parsers.typed import resolve, types_of
from quire.types.reply import Tool

_CALL = Markers(["call:"])
_NAME = re.compile(r"[^\s{}<>]*")
_KEY = re.compile(r"[^\s:,{}\[\]()<>\"'=]+")  # what the grammar may write without quotes
_MAX_DEPTH = 12  # of a schema; recursive ones have no grammar here

Schema = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Gemma(MarkedFormat):
    quote: str  # before and behind a string

    def read_section(
        self, scanner: Scanner, pieces: PieceBuilder, opening: str, tools: Sequence[Tool]
    ) -> Step[Section]:
        del opening
        yield from scanner.skip_space()
        if (yield from scanner.marker(_CALL)) is None:
            return NOT_A_CALL
        name = yield from scanner.word(_NAME)
        yield from scanner.skip_space()
        if not name or (yield from scanner.char()) != "{":
            return NOT_A_CALL
        scanner.pos += 1
        if not (yield from self._read_arguments(scanner, ArgumentWriter(pieces, tools, name))):
            return Section(1)
        yield from scanner.skip_space()
        return Section(1, closed=(yield from scanner.marker(self._closings)) is not None)

    def _read_arguments(self, scanner: Scanner, writer: ArgumentWriter) -> Step[bool]:
        while True:
            yield from scanner.skip_space()
            if (yield from scanner.char()) == "}":
                scanner.pos += 1
                writer.end()
                return True
            key = yield from self._literals.read_key(scanner)
            yield from scanner.skip_space()
            if key is None or (yield from scanner.char()) != ":":
                return False
            scanner.pos += 1
            yield from scanner.skip_space()
            writer.key(key)
            if not (yield from self._literals.read(scanner, writer.emit)):
                return False
            yield from scanner.skip_space()
            char = yield from scanner.char()
            if char == ",":
                scanner.pos += 1
            elif char != "}":
                return False

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> TextAndCalls | None:
        calls = []
        for tool in tools:
            root = schema_of(tool)
            arguments = _Values(root, self.quote).fields(root, 0)
            if arguments is None:
                return None
            calls.append(tag(f"{self.openings[0]}call:{tool.name}{{", arguments, "}" + self.closings[0]))
        return TextAndCalls(calls=calls, triggers=self.openings, parallel=parallel)

    @cached_property
    def _literals(self) -> Literals:
        return Literals(quote=self.quote, bare_keys=True)

    @cached_property
    def _closings(self) -> Markers:
        return Markers(self.closings)


@dataclass(frozen=True, slots=True)
class _Values:
    """The grammars of values under the schema `root`: not JSON, as strings stand between markers on every level."""

    root: Schema
    quote: str

    def fields(self, schema: Schema, depth: int) -> Part | None:
        """What stands between the braces of an object. None if no grammar can hold it."""
        needed: list[Part] = []
        others: list[Part] = []
        fields = fields_of(schema, self.root)
        if fields is None:
            return None
        for key, one, _, is_needed in fields:
            value = self.value(one, depth + 1)
            if value is None or not _KEY.fullmatch(key):
                return None
            (needed if is_needed else others).append(sequence(literal(f"{key}:"), value))
        return separated(needed, others, ",")

    def value(self, schema: object, depth: int) -> Part | None:
        schema = resolve(schema, self.root)
        variants = schema.get("anyOf") or schema.get("oneOf")
        if depth > _MAX_DEPTH:
            return None
        parts: list[Part | None]
        if "enum" in schema or "const" in schema:
            parts = [self._constant(one) for one in schema.get("enum", [schema.get("const")])]
        elif isinstance(variants, list):
            parts = [self.value(one, depth + 1) for one in variants]
        else:
            parts = [self._typed(kind, schema, depth) for kind in sorted(types_of(schema, self.root))]
        known = [part for part in parts if part is not None]
        return either(known) if known and len(known) == len(parts) else None

    def _constant(self, value: object) -> Part | None:
        if isinstance(value, str):
            return literal(self.quote + value + self.quote)
        return None if isinstance(value, list | dict) else literal(dumps(value))

    def _typed(self, kind: str, schema: Schema, depth: int) -> Part | None:
        if kind == "string":
            text = string_part(schema, self.quote)
            return None if text is None else tag(self.quote, text, self.quote)
        if kind == "object":
            fields = self.fields(schema, depth)
            return None if fields is None else sequence(literal("{"), fields, literal("}"))
        if kind == "array":
            return self._list(schema, depth)
        return json_value({**schema, "type": kind})

    def _list(self, schema: Schema, depth: int) -> Part | None:
        item = self.value(schema.get("items"), depth + 1)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if item is None or LIST_TIES & schema.keys() or most == 0:
            return None
        more = repeat(sequence(literal(","), item), max(least - 1, 0), None if most is None else most - 1)
        items = sequence(item, more)
        return sequence(literal("["), items if least else optional(items), literal("]"))


FUNCTIONGEMMA = _Gemma(openings=("<start_function_call>",), closings=("<end_function_call>",), quote="<escape>")
GEMMA4 = _Gemma(openings=("<|tool_call>",), closings=("<tool_call|>",), quote='<|"|>')
