"""Harmony, the messages of gpt-oss: each has a channel, and a recipient if it is a call."""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.parsers.calls import PieceBuilder
from quire.parsers.json_text import pass_value
from quire.parsers.layout import ContentReader, LayoutParser
from quire.parsers.scanner import Markers, Scanner, Step

START, CHANNEL, MESSAGE, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_ENDS = ("<|end|>", CALL, "<|return|>")
_HEAD_BEGINS = Markers((START, CHANNEL, MESSAGE, *_ENDS))
_BODY_ENDS = Markers((*_ENDS, START, CHANNEL))
_MESSAGE = Markers([MESSAGE])
_ROLE = Markers(["to=", "assistant"])  # how a message begins whose head the prompt has opened
MAX_HEAD = 512  # characters
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(LayoutParser):
    """analysis is reasoning, a message to somebody a call, all else content.

    prompt: the rendered text; what stands behind its last <|start|> is the beginning of the first message.
    raw_calls: leave the messages to somebody in the content as they are written, for a tool parser behind this one.
    """

    def __init__(self, prompt: str = "", *, parallel: bool = True, raw_calls: bool = False) -> None:
        self._pieces = PieceBuilder(parallel)
        self._raw_calls = raw_calls
        super().__init__(self._read, self._pieces)
        _, is_open, head = prompt.rpartition(START)
        if is_open and not any(end in head for end in _ENDS) and (CHANNEL in head or "to=" in head):
            self.feed(START + head)

    def _read(self, scanner: Scanner) -> Step[None]:
        content = ContentReader(scanner, self._pieces)
        marker: str | None = None
        if (yield from scanner.follows(_ROLE)) and not scanner.ended:
            marker = START
            scanner.begin(scanner.pos)
        while True:
            if marker is None:
                marker = yield from content.read(_HEAD_BEGINS)
                if marker is None:
                    return
                scanner.begin(scanner.pos - len(marker))
            if marker in _ENDS:
                marker = None  # of no message
                content.behind_call()
                continue
            head = "" if marker == MESSAGE else (yield from self._read_head(marker))
            taken = scanner.taken()
            if head is None:
                if scanner.ended:  # cut off: it says nothing
                    scanner.pos = len(scanner.text)
                    return
                content.give_back(taken)
                marker = None
                continue
            marker = yield from self._read_body(head, taken)
            content.behind_call()
            if marker in (START, CHANNEL):
                scanner.begin(scanner.pos - len(marker))
            else:
                marker = None

    def _read_head(self, marker: str) -> Step[str | None]:
        head = yield from self._scanner.until(_MESSAGE, MAX_HEAD)
        return marker + head[0] if head is not None else None

    def _read_body(self, head: str, taken: str) -> Step[str | None]:
        """A message from behind its head to behind the marker that ends it, which is the result."""
        recipient = _RECIPIENT.search(head)
        channel = _CHANNEL.search(head)
        if recipient is None:
            is_reasoning = channel is not None and channel[1] == "analysis"
            emit = self._pieces.reasoning if is_reasoning else self._pieces.content
            return (yield from self._scanner.pass_until(_BODY_ENDS, emit, are_tokens=True))
        if self._raw_calls:
            self._pieces.content(taken)
            end = yield from self._scanner.pass_until(_BODY_ENDS, self._pieces.content, are_tokens=True)
            self._pieces.content(end if end in _ENDS else "")
            return end
        return (yield from self._read_call(recipient[1].removeprefix("functions.")))

    def _read_call(self, name: str) -> Step[str | None]:
        scanner, pieces = self._scanner, self._pieces
        yield from scanner.skip_space()
        char = yield from scanner.char()
        emit: Callable[[str], None] = _drop
        if char == "{":
            pieces.start(name)
            if (yield from pass_value(scanner, pieces.arguments)):
                pieces.end()
        elif (yield from scanner.follows(_BODY_ENDS)) and not scanner.ended:
            pieces.start(name)
            pieces.arguments("{}")
            pieces.end()
        else:  # code, for a tool of the model's own: no JSON, and passed on as it is
            pieces.start(name)
            emit = pieces.arguments
        return (yield from scanner.pass_until(_BODY_ENDS, emit, are_tokens=True))


def _drop(text: str) -> None:
    """Behind the arguments."""
