"""Answers that are a row of messages, each with a header that says what it is: reasoning, content or a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from quire.parsers.base import Parser
from quire.parsers.harmony import HarmonyParser
from quire.parsers.scanner import Markers
from quire.types.reply import Content, Piece, Reasoning

Kind = Literal["reasoning", "content", "call"]


class HarmonyReasoning:
    """gpt-oss: the channel `analysis` is reasoning."""

    start = "<|channel|>analysis<|message|>"
    end = "<|channel|>final<|message|>"
    end_head = "<|channel|>final"  # <|constrain|>json or the like may follow before <|message|>
    end_before_calls = "<|end|>"
    wraps_content = True

    def opening(self, prompt: str, template_kwargs: Mapping[str, Any]) -> str:
        del prompt, template_kwargs
        return "open"

    def parser(
        self, prompt: str, template_kwargs: Mapping[str, Any], *, bound: bool = False, raw_calls: bool = False
    ) -> Parser:
        del template_kwargs, bound  # the content is never trimmed
        return HarmonyParser(prompt, raw_calls=raw_calls)


@dataclass(frozen=True)
class Channels:
    """Messages marked by tags. Calls pass as they are, header and all, for the parser of calls."""

    start: str  # of the reasoning, as the engine sees it
    end: str  # … where the content begins
    end_before_calls: str
    heads: tuple[str, ...]  # a header begins with one of them
    head_ends: tuple[str, ...]  # … and is complete with one of these
    body_ends: tuple[str, ...]  # otherwise a message ends where a header begins
    kind: Callable[[str], Kind]  # of a complete header

    wraps_content = True

    @cached_property
    def head_markers(self) -> Markers:
        return Markers(self.head_ends)

    @cached_property
    def body_markers(self) -> Markers:
        return Markers(self.body_ends + self.heads)

    def opening(self, prompt: str, template_kwargs: Mapping[str, Any]) -> str:
        del prompt, template_kwargs
        return "open"

    def parser(
        self, prompt: str, template_kwargs: Mapping[str, Any], *, bound: bool = False, raw_calls: bool = False
    ) -> Parser:
        del prompt, template_kwargs, bound, raw_calls  # the content is never trimmed
        return _ChannelParser(self)


class _ChannelParser:
    def __init__(self, rules: Channels) -> None:
        self._rules = rules
        self._held = ""  # not decided yet
        self._pieces: list[Piece] = []
        self._kind: Kind = "content"
        self._in_header = False

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        while self._held and (self._header() if self._in_header else self._body()):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Half a header says nothing; half a marker in a text is text after all."""
        rest, self._held = self._held, ""
        if not self._in_header:
            self._pass_on(rest)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _header(self) -> bool:
        found = self._rules.head_markers.search(self._held)
        if found is None:
            return False
        header, self._held = self._held[: found.end()], self._held[found.end() :]
        self._kind = self._rules.kind(header)
        if self._kind == "call":
            self._pass_on(header)
        self._in_header = False
        return True

    def _body(self) -> bool:
        markers = self._rules.body_markers
        found = markers.search(self._held)
        end = found.start() if found else markers.undecided(self._held, 0)
        self._pass_on(self._held[:end])
        if found is None:
            self._held = self._held[end:]
            return False
        self._in_header = found.group() in self._rules.heads
        if self._in_header:
            self._held = self._held[end:]
        else:
            if self._kind == "call":
                self._pass_on(found.group())
            self._held = self._held[found.end() :]
            self._kind = "content"
        return True

    def _pass_on(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text) if self._kind == "reasoning" else Content(text))


def _inkling_kind(header: str) -> Kind:
    if "<|content_invoke_tool" in header:
        return "call"
    return "reasoning" if "<|content_thinking|>" in header else "content"


HARMONY = HarmonyReasoning()
INKLING = Channels(
    start="<|content_thinking|>",
    end="<|content_text|>",
    heads=("<|message_model|>", "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"),
    head_ends=("<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"),
    body_ends=("<|end_message|>",),
    end_before_calls="<|end_message|>",
    kind=_inkling_kind,
)
