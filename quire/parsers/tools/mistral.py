"""Mistral: a JSON list behind [TOOL_CALLS] (up to tokenizer v10), or NAME[ARGS]{…} (v11 and later)."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass

from quire.parsers.calls import PieceBuilder
from quire.parsers.layouts.json_calls import Ending, JsonCalls, pass_arguments
from quire.parsers.layouts.marked import NOT_A_CALL, MarkedFormat, Section
from quire.parsers.layouts.structural import TextAndCalls, json_value, schema_of, tag
from quire.parsers.scanner import Markers, Scanner, Step
from quire.types.reply import Tool

_CALLS, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_WORDS = re.compile(r"[^\[{\n]*")
_HEAD_ENDS = Markers([_ARGS, _ID, "{"])
_ALPHANUMERICS = string.ascii_letters + string.digits


def new_mistral_id() -> str:
    """Nine letters and digits: what the models' templates ask for."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))


@dataclass(frozen=True, kw_only=True)
class _Mistral(MarkedFormat):
    """Reads both; the grammar is the newer one's."""

    calls: JsonCalls

    def read_section(
        self, scanner: Scanner, pieces: PieceBuilder, opening: str, tools: Sequence[Tool]
    ) -> Step[Section]:
        del opening, tools
        yield from scanner.skip_space()
        if (yield from scanner.char()) in ("[", "{"):
            return (yield from self.calls.read_calls(scanner, pieces, needs_arguments=False))
        head = yield from scanner.head(_WORDS, _HEAD_ENDS)
        name, call_id = head[0].strip() if head is not None else "", None
        if head is not None and head[1] == _ID:
            head = yield from scanner.head(_WORDS, _HEAD_ENDS)
            call_id = head[0].strip() if head is not None else None
        if head is None or head[1] == _ID or not name:
            return NOT_A_CALL
        if head[1] == "{":
            scanner.pos -= 1
        yield from scanner.skip_space()
        ending = yield from pass_arguments(scanner, pieces, name, call_id or None)
        return NOT_A_CALL if ending is Ending.NONE else Section(1)

    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> TextAndCalls:
        calls = [tag(f"{_CALLS}{tool.name}{_ARGS}", json_value(schema_of(tool)), "") for tool in tools]
        return TextAndCalls(calls=calls, triggers=[_CALLS], parallel=parallel)


_LIST = JsonCalls(openings=(_CALLS,))
MISTRAL = _Mistral(openings=(_CALLS,), calls=_LIST, separators=_LIST.separators, new_id=new_mistral_id)
