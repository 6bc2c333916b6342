"""GLM 4.5 and later, Laguna, HY-V3: a name, then keys and values, each in a tag of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quire.parsers.arguments import ArgumentWriter, ValueEnd
from quire.parsers.calls import PieceBuilder
from quire.parsers.layouts.bare_values import ArgumentTags, argument_list
from quire.parsers.layouts.json_calls import Ending
from quire.parsers.layouts.marked import NOT_A_CALL, MarkedFormat, Section
from quire.parsers.layouts.structural import TextAndCalls, tag
from quire.parsers.scanner import LINE, Markers, Scanner, Step
from quire.types.reply import Tool

_SUFFIX = re.compile(r"[^<>\s]*")
_TAG_END = Markers([">"])


class _Tags:
    """The tags of a call; HY-V3 may end all their names with one suffix."""

    def __init__(self, suffix: str = "") -> None:
        self.call = f"<tool_call{suffix}>"
        self.call_end = f"</tool_call{suffix}>"
        self.name_end = f"<tool_sep{suffix}>"
        self.key, self.key_end = f"<arg_key{suffix}>", f"</arg_key{suffix}>"
        self.value, self.value_end = f"<arg_value{suffix}>", f"</arg_value{suffix}>"
        self.name_ends = Markers((self.name_end, self.key, self.call_end, "\n"))
        self.in_call = Markers((self.name_end, self.key, self.call_end))
        self.key_ends = Markers([self.key_end])
        self.values = Markers([self.value])
        self.end_of_value = ValueEnd(self.value_end, (self.key, self.call_end))
        self.in_section = Markers((self.call, f"</tool_calls{suffix}>"))


_PLAIN = _Tags()


def _read_call(scanner: Scanner, pieces: PieceBuilder, tags: _Tags, tools: Sequence[Tool]) -> Step[Ending]:
    """From behind the tag that opens a call to behind the one that ends it."""
    yield from scanner.skip_space()
    head = yield from scanner.head(LINE, tags.name_ends)
    name = head[0].strip() if head is not None else ""
    if head is None or not name:
        return Ending.NONE
    marker: str | None = head[1]
    while marker in ("\n", tags.name_end):
        yield from scanner.skip_space()
        marker = yield from scanner.marker(tags.in_call)
    if marker is None:
        return Ending.NONE
    writer = ArgumentWriter(pieces, tools, name)
    while marker == tags.key:
        key = yield from scanner.head(LINE, tags.key_ends)
        yield from scanner.skip_space()
        if key is None or (yield from scanner.marker(tags.values)) is None:
            return Ending.CUT
        if not (yield from writer.read_bare(scanner, key[0].strip(), tags.end_of_value)):
            return Ending.CUT
        yield from scanner.skip_space()
        marker = yield from scanner.marker(tags.in_call)
    if marker != tags.call_end:
        return Ending.CUT
    writer.end()
    return Ending.WHOLE


def _call_grammar(tools: Sequence[Tool], name_end: str, line: str) -> list[dict[str, object]] | None:
    tags = ArgumentTags(
        begin=_PLAIN.key, begin_end=f"{_PLAIN.key_end}{line}{_PLAIN.value}", end=_PLAIN.value_end, line=line
    )
    calls: list[dict[str, object]] = []
    for tool in tools:
        arguments = argument_list(tool, tags)
        if arguments is None:
            return None
        calls.append(tag(f"{_PLAIN.call}{tool.name}{name_end}{line}", arguments, _PLAIN.call_end))
    return calls


@dataclass(frozen=True, kw_only=True)
class _Glm(MarkedFormat):
    """One call after the other."""

    line: str  # behind each tag, as the model writes it

    def read_section(
        self, scanner: Scanner, pieces: PieceBuilder, opening: str, tools: Sequence[Tool]
    ) -> Step[Section]:
        del opening
        ending = yield from _read_call(scanner, pieces, _PLAIN, tools)
        return NOT_A_CALL if ending is Ending.NONE else Section(1, closed=ending is Ending.WHOLE)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> TextAndCalls | None:
        calls = _call_grammar(tools, "", self.line)
        if calls is None:
            return None
        return TextAndCalls(calls=calls, separator=self.line, triggers=[_PLAIN.call], parallel=parallel)


@dataclass(frozen=True, kw_only=True)
class _HyV3(MarkedFormat):
    """Calls in a section, whose opening tag says the suffix of all tags in it."""

    def read_section(
        self, scanner: Scanner, pieces: PieceBuilder, opening: str, tools: Sequence[Tool]
    ) -> Step[Section]:
        del opening
        head = yield from scanner.head(_SUFFIX, _TAG_END)
        if head is None:
            return NOT_A_CALL
        tags = _Tags(head[0]) if head[0] else _PLAIN
        calls = 0
        while True:
            yield from scanner.skip_space()
            if calls:
                scanner.begin(scanner.pos)
            marker = yield from scanner.marker(tags.in_section)
            if marker != tags.call:
                return Section(calls, closed=marker is not None)
            ending = yield from _read_call(scanner, pieces, tags, tools)
            calls += ending is not Ending.NONE
            if ending is not Ending.WHOLE:
                return Section(calls, broken=ending is Ending.NONE)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> TextAndCalls | None:
        calls = _call_grammar(tools, _PLAIN.name_end, "\n")
        if calls is None:
            return None
        return TextAndCalls(
            calls=calls, separator="\n", begin="<tool_calls>\n", end="\n</tool_calls>", parallel=parallel
        )


GLM45 = _Glm(openings=("<tool_call>",), closings=("</tool_call>",), line="\n")
GLM47 = _Glm(openings=("<tool_call>",), closings=("</tool_call>",), line="")
HY_V3 = _HyV3(openings=("<tool_calls",), closings=("</tool_calls>",))
