"""The parts of an answer, as parsers find them in its text while it grows.

One order holds for every answer: reasoning, content and calls may alternate; the pieces of a call are a CallStart, its
CallArguments and a CallEnd, with no other call's pieces between. However an answer is cut, the pieces of one kind that
follow each other join to the same text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call: its name is complete."""

    index: int  # from 0, in the order of the answer
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments are complete: what came is one JSON object. A call that max_tokens cuts has none."""

    index: int


Piece = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None  # JSON schema of an object; None: anything
    strict: bool = False


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The answer must be a call of this function."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""  # JSON text of an object; cut off if the answer was
