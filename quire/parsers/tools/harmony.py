"""gpt-oss: calls are messages to functions.NAME."""

from __future__ import annotations

from collections.abc import Sequence

from quire.parsers.base import Parser
from quire.parsers.harmony import CALL, CHANNEL, MESSAGE, START, HarmonyParser
from quire.parsers.layouts.structural import (
    Part,
    either,
    json_value,
    literal,
    optional,
    schema_of,
    sequence,
    spec,
    star,
    tag,
    text_without,
)
from quire.types.reply import Tool
from quire.types.structured import GrammarSpec

_END = "<|end|>"
_NEXT = f"{START}assistant"


class Harmony:
    needs_special_tokens = True

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> Parser:
        del tools  # JSON has its own types
        return HarmonyParser(parallel=parallel)

    def constraint(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> GrammarSpec:
        """The answer may begin with analysis, or behind it. It ends with calls or with a final message."""
        calls = [
            tag(
                f"{CHANNEL}commentary to=functions.{tool.name} <|constrain|>json{MESSAGE}",
                json_value(schema_of(tool)),
                CALL,
            )
            for tool in tools
        ]
        analysis = _message("analysis", _END)
        head = sequence(optional(sequence(analysis, literal(_NEXT))), optional(literal(_NEXT)))
        body = _messages(calls, parallel)
        if not required:
            preambles = star(sequence(_message("commentary", _END), literal(_NEXT)))
            body = sequence(preambles, either([body, _message("final", "")]))
        return spec(sequence(head, body))


def _messages(tags: list[Part], parallel: bool) -> Part:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": _NEXT,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _message(channel: str, end: str) -> Part:
    return tag(f"{CHANNEL}{channel}{MESSAGE}", text_without("<|"), end)


HARMONY = Harmony()
