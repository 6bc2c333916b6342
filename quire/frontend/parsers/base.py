"""The contract of parsers: text goes in as it comes, in any portions; pieces come out as soon as they are certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from quire.foundation.registry import Registry
from quire.types.reply import Piece, Tool
from quire.types.structured import GrammarSpec


class Parser(Protocol):
    """Of one answer, once. However the text is cut, the pieces are the same when those alike are joined."""

    def feed(self, text: str) -> list[Piece]:
        """What `text` made certain; an undecided end (half a marker) is kept back."""
        ...

    def finish(self) -> list[Piece]:
        """The answer has ended: what was kept back. Markup that never became a call is content."""
        ...


class ToolFormat(Protocol):
    """How a family of models writes its tool calls; registered in TOOL_FORMATS under its names."""

    needs_special_tokens: ClassVar[bool]  # its markers are special tokens, which the text must keep

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> Parser:
        """tools: of the request; parallel: False drops all calls but the first."""
        ...

    def constraint(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> GrammarSpec | None:
        """What holds a model to this format and to the schemas of `tools`.

        required: at least one call and nothing else; else text, in which calls must be right. None: the format has no
        grammar.
        """
        ...


class ReasoningFormat(Protocol):
    """How a family of models marks its reasoning; registered in REASONING_FORMATS under its names."""

    start: ClassVar[str]  # "" if only the end is marked
    end: ClassVar[str]
    needs_special_tokens: ClassVar[bool]

    def parser(self, prompt: str, template_kwargs: dict[str, Any]) -> Parser:
        """prompt: the rendered text, whose end may lie inside the reasoning. Its pieces are Reasoning and Content."""
        ...

    def opening(self, prompt: str, template_kwargs: dict[str, Any]) -> str:
        """ "open": the answer begins inside the reasoning; "maybe": it may begin with `start`; "off": it does not."""
        ...


TOOL_FORMATS: Registry = Registry("tool parser", {})
REASONING_FORMATS: Registry = Registry("reasoning parser", {})
