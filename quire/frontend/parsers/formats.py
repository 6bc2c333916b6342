"""The formats that a model writes its calls and its reasoning in: named by options, or found in its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from quire.frontend.parsers.base import ReasoningFormat, ToolFormat


@dataclass(frozen=True, slots=True)
class Formats:
    """Of one model, found once."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    start: tuple[int, ...] = ()  # token ids of the marker that reasoning begins with
    end: tuple[int, ...] = ()  # … and of the one that ends it
    special_reasoning: bool = False  # these markers are special tokens, which the text must keep
