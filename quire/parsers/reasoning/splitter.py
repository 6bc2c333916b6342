"""Reasoning that stands between markers in front of the content."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from quire.parsers import scanner
from quire.types.reply import Content, Piece, Reasoning

MAX_TRIMMED = 8  # characters trimmed in front of a marker; more have been passed on when the marker comes


@dataclass(frozen=True)
class ReasoningMarkers:
    """How a family of models marks its reasoning. The first of `starts` and `ends` is the usual one."""

    starts: tuple[str, ...]  # may be missing, as the prompt often ends with it
    ends: tuple[str, ...]
    call_starts: tuple[str, ...] = ()  # end the reasoning too, and belong to what follows
    tags: tuple[str, ...] = ()  # put around the content, and dropped
    trimmed: str = "\n"  # characters between markers and text that belong to neither

    @cached_property
    def all_ends(self) -> scanner.Markers:
        return scanner.Markers(self.ends + self.call_starts)

    @cached_property
    def all_tags(self) -> scanner.Markers:
        return scanner.Markers(self.tags)

    @cached_property
    def suspects(self) -> Callable[[str], object]:
        """Finds what a portion of reasoning must be looked at for."""
        firsts = {marker[0] for marker in self.ends + self.call_starts}
        return re.compile(f"[{re.escape(''.join(sorted(firsts)))}]|[{re.escape(self.trimmed)}]\\Z").search


class Splitter:
    """opening: "open" (the text begins inside the reasoning), "maybe" (a marker says so) or "off" (all is content).

    bound: a grammar binds what follows the reasoning; nothing of it is trimmed or dropped.
    """

    def __init__(self, markers: ReasoningMarkers, opening: str, *, bound: bool = False) -> None:
        self._markers = markers
        self._is_open = opening == "open"
        self._bound = bound
        self._tags = markers.all_tags if markers.tags and not bound else None
        self._held = ""  # not decided yet
        self._pieces: list[Piece] = []
        self._read: Callable[[], bool] = self._start
        if opening == "off":
            self._read = self._content if self._tags is None else self._between

    def feed(self, text: str) -> list[Piece]:
        if not self._held:  # nothing but text needs no second look
            if self._read == self._content and self._tags is None:
                return [Content(text)]
            if self._read == self._thinking and not self._markers.suspects(text):
                return [Reasoning(text)]
        self._held += text
        while self._held and self._read():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """What was kept back: half a marker is text after all."""
        rest, self._held = self._held, ""
        if not rest:
            return []
        is_reasoning = self._read == self._thinking or (self._read == self._start and self._is_open)
        return [Reasoning(rest) if is_reasoning else Content(rest)]

    # Each reads from the start of what is held. False: it has read what it can.

    def _start(self) -> bool:
        """Perhaps a start marker; models repeat one that the prompt ends with."""
        rest = self._held.lstrip()
        for start in self._markers.starts:
            if rest.startswith(start):
                self._held, self._read = rest[len(start) :], self._lead
                return True
        if any(start.startswith(rest) for start in self._markers.starts):
            return False
        self._read = self._lead if self._is_open else self._content
        return True

    def _lead(self) -> bool:
        self._held = self._held.lstrip(self._markers.trimmed)
        if self._held:
            self._read = self._thinking
        return True

    def _thinking(self) -> bool:
        text, markers = self._held, self._markers
        found = markers.all_ends.search(text)
        if found is None:
            self._pass_on(Reasoning, self._trimmed_end(markers.all_ends.undecided(text, 0)))
            return False
        self._pass_on(Reasoning, self._trimmed_end(found.start()))
        if found.group() in markers.call_starts:
            self._held, self._read = text[found.start() :], self._content
        else:
            self._held, self._read = text[found.end() :], self._content if self._bound else self._after
        return True

    def _after(self) -> bool:
        """Behind the end marker, which some models write twice."""
        self._held = self._held.lstrip(self._markers.trimmed)
        for end in self._markers.ends:
            if self._held.startswith(end):
                self._held = self._held[len(end) :]
                return True
        if any(end.startswith(self._held) for end in self._markers.ends):
            return False
        self._read = self._content
        return True

    def _between(self) -> bool:
        """Behind a tag or at the beginning."""
        self._held = self._held.lstrip(self._markers.trimmed)
        if self._held:
            self._read = self._content
        return True

    def _content(self) -> bool:
        text, tags = self._held, self._tags
        if tags is None:
            self._pass_on(Content, len(text))
            return False
        found = tags.search(text)
        if found is None:
            self._pass_on(Content, self._trimmed_end(tags.undecided(text, 0)))
            return False
        self._pass_on(Content, self._trimmed_end(found.start()))
        self._held, self._read = text[found.end() :], self._between
        return True

    def _trimmed_end(self, end: int) -> int:
        """`end`, or before the characters in front of it that are trimmed."""
        first = max(0, end - MAX_TRIMMED)
        while end > first and self._held[end - 1] in self._markers.trimmed:
            end -= 1
        return end

    def _pass_on(self, kind: type[Reasoning] | type[Content], end: int) -> None:
        if end:
            self._pieces.append(kind(self._held[:end]))
        self._held = self._held[end:]
