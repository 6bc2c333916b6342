"""FunctionGemma and Gemma 4: call:NAME{k:v,…}, strings between markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quire.frontend.parsers.arguments import ArgumentWriter
from quire.frontend.parsers.calls import Pieces
from quire.frontend.parsers.layouts.marked import NOT_A_CALL, MarkedFormat, Section
from quire.frontend.parsers.layouts.structural import TextAndCalls
from quire.frontend.parsers.literals import Literals
from quire.frontend.parsers.scanner import Markers, Scanner, Step
from quire.types.reply import Tool

_CALL = Markers(["call:"])
_NAME = re.compile(r"[^\s{}<>]*")


@dataclass(frozen=True, kw_only=True)
class _Gemma(MarkedFormat):
    quote: str  # before and behind a string

    def read_section(self, scanner: Scanner, pieces: Pieces, opening: str, tools: Sequence[Tool]) -> Step[Section]:
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
        """None: the strings inside lists and objects are no JSON, and no structural tag writes them."""
        del tools, parallel
        return None

    @cached_property
    def _literals(self) -> Literals:
        return Literals(quote=self.quote, bare_keys=True)

    @cached_property
    def _closings(self) -> Markers:
        return Markers(self.closings)


FUNCTIONGEMMA = _Gemma(openings=("<start_function_call>",), closings=("<end_function_call>",), quote="<escape>")
GEMMA4 = _Gemma(openings=("<|tool_call>",), closings=("<tool_call|>",), quote='<|"|>')
