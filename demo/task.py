"""What one exercise of the corpus looks like, and how it is assigned to training or to the held-out set."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from random import Random

from demo.chat import Message, Tool
from demo.stories import Plot

HELD_OUT_SHARE = 16  # one problem in this many is never trained on


@dataclass
class Task:
    """A conversation up to the point where the model must answer, with the answer.

    `key` names the problem whatever skill it is dressed as; the train/held-out split depends on it alone.
    """

    skill: str
    key: str
    messages: list[Message]
    answer: str
    thought: str
    tools: list[Tool] | None = None
    thinking: bool = False
    plot: Plot | None = field(default=None)

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.key.encode()) % HELD_OUT_SHARE == 0


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, thought: str = "") -> Message:
    message = {"role": "assistant", "content": text}
    return {**message, "reasoning_content": thought} if thought else message


_PREFIXES = (
    "",
    "",
    "",
    "",
    "Please: ",
    "Hi! ",
    "Hello, ",
    "Quick question: ",
    "Hey, ",
    "One more: ",
    "Now: ",
)


def ask(rng: Random, question: str, mark: str = "?", lower: bool = True) -> str:
    """The question as people type it: politely or not, with or without its mark and its capital letters."""
    text = question + (mark if rng.random() < 0.8 else "")
    text = rng.choice(_PREFIXES) + text[:1].upper() + text[1:]
    if lower and rng.random() < 0.2:
        text = text.lower()
    return text
