"""Calls whose name stands in a head of its own, before the JSON of the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quire.parsers.calls import PieceBuilder
from quire.parsers.layouts.json_calls import Ending, pass_arguments
from quire.parsers.layouts.marked import MarkedFormat, Section
from quire.parsers.layouts.structural import Part, TextAndCalls, json_value, literal, schema_of, sequence, tag
from quire.parsers.scanner import LINE, SPACE, Markers, Scanner, Step
from quire.types.reply import Tool


@dataclass(frozen=True, kw_only=True)
class HeadedJson(MarkedFormat):
    """call_begin NAME arguments_begin {…} call_end, repeated in a section; the section's opening is openings[0]."""

    call_begin: str
    arguments_begin: str
    call_end: str
    fence: str = ""  # around the arguments, as of a code block; its lines are part of neither
    joint: str = ""  # between calls
    separators: str = SPACE + "`"

    def name_and_id(self, head: str) -> tuple[str, str | None]:
        """Of the text between call_begin and arguments_begin."""
        return head.strip(), None

    def head_grammar(self, name: str) -> tuple[str, list[Part]]:
        """How the head is written: its fixed beginning, and what follows."""
        return name, []

    def read_section(
        self, scanner: Scanner, pieces: PieceBuilder, opening: str, tools: Sequence[Tool]
    ) -> Step[Section]:
        del tools  # JSON has its own types
        calls = 0
        begun = opening == self.call_begin
        while True:
            if not begun:
                yield from scanner.skip_space()
                if calls:
                    scanner.begin(scanner.pos)
                marker = yield from scanner.marker(self._in_section)
                if marker is None or marker != self.call_begin:
                    return Section(calls, closed=marker is not None)
            ending = yield from self._read_call(scanner, pieces)
            if ending is Ending.NONE:
                return Section(calls, broken=True)
            calls += 1
            if ending is Ending.CUT:
                return Section(calls)
            yield from self._read_call_end(scanner)
            begun = False

    def _read_call(self, scanner: Scanner, pieces: PieceBuilder) -> Step[Ending]:
        head = yield from scanner.head(LINE, self._head_ends)
        if head is None or head[1] != self.arguments_begin:
            return Ending.NONE
        name, call_id = self.name_and_id(head[0])
        if not name:
            return Ending.NONE
        yield from scanner.skip_space()
        return (yield from pass_arguments(scanner, pieces, name, call_id))

    def _read_call_end(self, scanner: Scanner) -> Step[None]:
        yield from scanner.skip_space()
        if self.fence:
            yield from scanner.marker(self._fence)
            yield from scanner.skip_space()
        yield from scanner.marker(self._call_end)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> TextAndCalls:
        fence = f"\n{self.fence}" if self.fence else ""
        calls = []
        for tool in tools:
            head, more = self.head_grammar(tool.name)
            arguments = [literal(self.arguments_begin)] if more else []
            begin = self.call_begin + head + ("" if more else self.arguments_begin)
            content = sequence(*more, *arguments, json_value(schema_of(tool)))
            calls.append(tag(begin, content, fence + self.call_end))
        return TextAndCalls(
            calls=calls, separator=self.joint, begin=self.openings[0], end=self.closings[0], parallel=parallel
        )

    @cached_property
    def _in_section(self) -> Markers:
        return Markers((self.call_begin, *self.closings))

    @cached_property
    def _head_ends(self) -> Markers:
        return Markers((self.arguments_begin, self.call_end))

    @cached_property
    def _fence(self) -> Markers:
        return Markers([self.fence])

    @cached_property
    def _call_end(self) -> Markers:
        return Markers([self.call_end])
