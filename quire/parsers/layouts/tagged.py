"""Calls as tags: one for the function, inside it one for each argument, whose text the tool's schema types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quire.parsers.arguments import ArgumentWriter, ValueEnd
from quire.parsers.calls import PieceBuilder
from quire.parsers.layouts.bare_values import ArgumentTags, argument_list
from quire.parsers.layouts.marked import MarkedFormat, Section
from quire.parsers.layouts.structural import TextAndCalls, tag
from quire.parsers.scanner import LINE, Markers, Scanner, Step
from quire.types.reply import Tool

_TAG_END = Markers([">"])
_NAME = re.compile(r"""\bname\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_IS_STRING = re.compile(r"""\bstring\s*=\s*["']?(true|false)""")


@dataclass(frozen=True, kw_only=True)
class TaggedCalls(MarkedFormat):
    """<call>…<argument>value</argument>…</call>, with or without a section around.

    A tag names its function or argument as <call=NAME>, or in an attribute as <call name="NAME">.
    """

    call: str  # how a call's tag begins, without ">": "<function=" or "<invoke"
    call_end: str
    argument: str
    argument_end: str
    padding: str = ""  # around a value, and no part of it
    has_types: bool = False  # an attribute says string="true" or "false": then the value is JSON
    noise: tuple[str, ...] = ()  # markers between calls that say nothing
    # What the grammar writes around a call, and between its tags.
    section_begin: str = ""
    section_end: str = ""
    call_prefix: str = ""
    call_suffix: str = ""
    line: str = ""  # behind each tag
    joint: str = ""  # between calls

    def read_section(
        self, scanner: Scanner, pieces: PieceBuilder, opening: str, tools: Sequence[Tool]
    ) -> Step[Section]:
        calls = 0
        begun = opening == self.call
        while True:
            if not begun:
                yield from scanner.skip_space()
                if calls:
                    scanner.begin(scanner.pos)
                marker = yield from scanner.marker(self._in_section)
                if marker in self.noise:
                    continue
                if marker != self.call:
                    return Section(calls, closed=marker is not None)
            begun = False
            head = yield from scanner.head(LINE, _TAG_END)
            name = self._name(head)
            if not name:
                return Section(calls, broken=True)
            yield from scanner.skip_space()
            first = yield from scanner.marker(self._in_call)
            if first is None:
                return Section(calls, broken=True)
            calls += 1
            if not (yield from self._read_arguments(scanner, first, ArgumentWriter(pieces, tools, name))):
                return Section(calls)

    def _read_arguments(self, scanner: Scanner, marker: str | None, writer: ArgumentWriter) -> Step[bool]:
        """From behind the first tag inside a call to the call's end; False if something else comes."""
        while marker == self.argument:
            head = yield from scanner.head(LINE, _TAG_END)
            key = self._name(head)
            if head is None or not key:
                return False
            is_string = _IS_STRING.search(head[0]) if self.has_types else None
            if is_string is None:
                whole = yield from writer.read_bare(scanner, key, self._value_end)
            elif is_string[1] == "true":
                whole = yield from writer.read_string(scanner, key, self._value_end)
            else:
                whole = yield from writer.read_json(scanner, key, self._value_end)
            if not whole:
                return False
            yield from scanner.skip_space()
            marker = yield from scanner.marker(self._in_call)
        if marker is None:
            return False
        writer.end()
        return True

    def _name(self, head: tuple[str, str] | None) -> str:
        """Of the text between the beginning of a tag and its ">"."""
        if head is None:
            return ""
        named = _NAME.search(head[0])
        return (named[1] or named[2] or "") if named else head[0].strip().strip("\"'")

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> TextAndCalls | None:
        tags = ArgumentTags(
            begin=self._open(self.argument),
            begin_end=self._close(self.argument),
            end=self.argument_end,
            line=self.line,
            padding=self.padding,
            has_types=self.has_types,
        )
        calls = []
        for tool in tools:
            arguments = argument_list(tool, tags)
            if arguments is None:
                return None
            begin = f"{self.call_prefix}{self._open(self.call)}{tool.name}{self._close(self.call)}{self.line}"
            calls.append(tag(begin, arguments, self.call_end + self.call_suffix))
        return TextAndCalls(
            calls=calls,
            separator=self.joint,
            begin=self.section_begin,
            end=self.section_end,
            triggers=[self.openings[0]],
            parallel=parallel,
        )

    @staticmethod
    def _open(begin: str) -> str:
        return begin if begin.endswith("=") else f'{begin} name="'

    @staticmethod
    def _close(begin: str) -> str:
        return ">" if begin.endswith("=") else '">'

    @cached_property
    def _in_section(self) -> Markers:
        return Markers((self.call, *self.noise, *self.closings))

    @cached_property
    def _in_call(self) -> Markers:
        return Markers((self.argument, self.call_end))

    @cached_property
    def _value_end(self) -> ValueEnd:
        return ValueEnd(self.argument_end, (self.argument, self.call_end), self.padding)
