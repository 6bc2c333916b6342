"""Calls written as in Python: [NAME(a=1, b="x"), OTHER()]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quire.parsers.arguments import ArgumentWriter
from quire.parsers.calls import PieceBuilder
from quire.parsers.layouts.bare_values import arguments_of, separated, with_definitions
from quire.parsers.layouts.json_calls import Ending
from quire.parsers.layouts.marked import NOT_A_CALL, MarkedFormat, Section
from quire.parsers.layouts.structural import Part, TextAndCalls, json_value, literal, sequence, tag
from quire.parsers.literals import Literals
from quire.parsers.scanner import SPACE, Markers, Scanner, Step
from quire.types.reply import Tool

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_PYTHON = Literals()


@dataclass(frozen=True, kw_only=True)
class PythonicCalls(MarkedFormat):
    """A list of calls, or calls line by line, with or without markers around."""

    begin: str = ""  # what the grammar writes before the calls …
    end: str = ""  # … and behind them
    joint: str = ", "
    separators: str = SPACE + ",;]"

    def read_section(
        self, scanner: Scanner, pieces: PieceBuilder, opening: str, tools: Sequence[Tool]
    ) -> Step[Section]:
        calls = 0
        in_list = opening == "["
        while True:
            yield from scanner.skip_space()
            char = yield from scanner.char()
            if char == "[" and not in_list and not calls:
                in_list = True
                scanner.pos += 1
            elif char == "," and calls:
                scanner.pos += 1
            elif char == "]" and in_list and calls:
                scanner.pos += 1
                yield from scanner.skip_space()
                break
            elif char and (char.isalpha() or char == "_"):
                if calls:
                    scanner.begin(scanner.pos)
                ending = yield from self._read_call(scanner, pieces, tools, is_bare=opening == "[")
                calls += ending is not Ending.NONE
                if ending is not Ending.WHOLE:
                    return Section(calls, broken=ending is Ending.NONE)
            else:
                break
        if not calls:
            return NOT_A_CALL
        closed = bool(self.closings) and (yield from scanner.marker(self._closings)) is not None
        return Section(calls, closed)

    def _read_call(
        self, scanner: Scanner, pieces: PieceBuilder, tools: Sequence[Tool], *, is_bare: bool
    ) -> Step[Ending]:
        """is_bare: no marker says that calls come, so that [name()] may be text: then it must be one of `tools`."""
        name = yield from scanner.word(_NAME)
        if (yield from scanner.char()) != "(":
            return Ending.NONE
        scanner.pos += 1
        writer: ArgumentWriter | None = None
        while True:
            yield from scanner.skip_space()
            if (yield from scanner.char()) == ")":
                scanner.pos += 1
                if writer is None and is_bare and all(tool.name != name for tool in tools):
                    return Ending.NONE
                (writer or ArgumentWriter(pieces, tools, name)).end()
                return Ending.WHOLE
            key = yield from scanner.word(_NAME)
            yield from scanner.skip_space()
            if not key or (yield from scanner.char()) != "=":
                return Ending.CUT if writer else Ending.NONE
            scanner.pos += 1
            yield from scanner.skip_space()
            writer = writer or ArgumentWriter(pieces, tools, name)
            writer.key(key)
            if not (yield from _PYTHON.read(scanner, writer.emit)):
                return Ending.CUT
            yield from scanner.skip_space()
            char = yield from scanner.char()
            if char == ",":
                scanner.pos += 1
            elif char != ")":
                return Ending.CUT

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> TextAndCalls | None:
        calls = []
        for tool in tools:
            arguments = _argument_list(tool)
            if arguments is None:
                return None
            calls.append(tag(f"{tool.name}(", arguments, ")"))
        return TextAndCalls(
            calls=calls,
            separator=self.joint,
            begin=self.begin,
            end=self.end,
            triggers=[f"[{tool.name}(" for tool in tools] if self.begin == "[" else self.openings[:1],
            parallel=parallel,
        )

    @cached_property
    def _closings(self) -> Markers:
        return Markers(self.closings)


def _argument_list(tool: Tool) -> Part | None:
    """Required arguments first; values as JSON, which these models read as well as Python's."""
    arguments = arguments_of(tool)
    if arguments is None or any(not _NAME.fullmatch(key) or not key for key, *_ in arguments):
        return None
    needed: list[Part] = []
    others: list[Part] = []
    for key, schema, root, is_needed in arguments:
        value = sequence(literal(f"{key}="), json_value(with_definitions(schema, root)))
        (needed if is_needed else others).append(value)
    return separated(needed, others, ", ")
