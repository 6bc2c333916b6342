"""Grammars of tool calls as structural tags: JSON values that say what may stand where.

The parts are those of xgrammar's structural tags, which is what GrammarSpec(kind="structural_tag") takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.foundation.errors import InputError
from quire.grammar.json_schema import normalize as json_schema
from quire.types.reply import Tool
from quire.types.structured import GrammarSpec

Part = dict[str, Any]

CALLS_BACKEND = "llguidance"  # whichever binds content: calls are marked by special tokens
MAX_WHITESPACE = 8  # characters between JSON tokens: a model must not fill its answer with them


def literal(text: str) -> Part:
    return {"type": "const_string", "value": text}


def sequence(*parts: Part) -> Part:
    return {"type": "sequence", "elements": list(parts)} if len(parts) != 1 else parts[0]


def either(parts: Sequence[Part]) -> Part:
    return {"type": "or", "elements": list(parts)} if len(parts) != 1 else parts[0]


def optional(part: Part) -> Part:
    return {"type": "optional", "content": part}


def star(part: Part) -> Part:
    return {"type": "star", "content": part}


def repeat(part: Part, least: int, most: int | None) -> Part:
    return {"type": "repeat", "content": part, "min": least, "max": -1 if most is None else most}


def regex(pattern: str) -> Part:
    return {"type": "regex", "pattern": pattern}


def text_without(*excluded: str, max_chars: int | None = None) -> Part:
    part: Part = {"type": "any_text", "excludes": list(excluded)}
    return part if max_chars is None else {**part, "max_chars": max_chars}


def tag(begin: str, content: Part, end: str) -> Part:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_value(schema: Mapping[str, Any] | bool) -> Part:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def schema_of(tool: Tool) -> dict[str, Any]:
    """Of the arguments of a tool, in plain form; one that says nothing takes any object.

    What cannot be enforced is left out of a tool that does not ask for strictness. Raises InputError for one that does.
    """
    field = f"the parameters of the function {tool.name!r}"
    try:
        text = json_schema.plain(dict(tool.parameters or {}), field, lenient=not tool.strict)
    except InputError as error:
        raise InputError(error.message, "tools") from None
    return {"type": "object", **json.loads(text)}


@dataclass(frozen=True, kw_only=True)
class TextAndCalls:
    """Calls, each a tag, in a section that `begin` and `end` mark; "" if each stands for itself."""

    calls: Sequence[Part]
    separator: str = ""
    begin: str = ""
    end: str = ""
    triggers: Sequence[str] = ()  # what begins a call in free text; the section's beginning unless given
    parallel: bool = True

    def required(self) -> GrammarSpec:
        """At least one call and nothing else."""
        return spec(sequence(*_literals(self.begin), self._calls(), *_literals(self.end)))

    def auto(self, *, excluded: Iterable[str]) -> GrammarSpec:
        """Text, in which a trigger begins calls. excluded: what else a parser takes for the beginning of one."""
        triggers = list(self.triggers) or [self.begin]
        if not self.begin:
            tags = list(self.calls)
        elif self.begin.startswith(triggers[0]):
            tags = [tag(self.begin, self._calls(), self.end)]
        else:
            tags = [self._section_of(call) for call in self.calls]
        return spec(
            {
                "type": "triggered_tags",
                "triggers": triggers,
                "tags": tags,
                "excludes": [text for text in excluded if len(text) > 1 and not any(text in one for one in triggers)],
                "stop_after_first": not self.parallel,
            }
        )

    def _calls(self) -> Part:
        return {
            "type": "tags_with_separator",
            "tags": list(self.calls),
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not self.parallel,
        }

    def _section_of(self, first: Part) -> Part:
        """A section as one tag that begins with its first call: where the section's own beginning says too little."""
        parts = [first["content"], literal(first["end"])]
        if self.parallel:
            parts.append(star(sequence(literal(self.separator), either(self.calls))))
        return tag(self.begin + first["begin"], sequence(*parts), self.end)


def _literals(text: str) -> list[Part]:
    return [literal(text)] if text else []


def spec(part: Part) -> GrammarSpec:
    text = json.dumps({"type": "structural_tag", "format": part}, ensure_ascii=False, separators=(",", ":"))
    return GrammarSpec("structural_tag", text, CALLS_BACKEND)
