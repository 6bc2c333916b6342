"""Reasoning that stands between markers in front of the content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.frontend.parsers.markers import find_first, held_back, num_trimmed
from quire.types.reply import Content, Piece, Reasoning


@dataclass(frozen=True, slots=True)
class Markers:
    """How a family of models marks its reasoning. The first of `starts` and `ends` is the usual one."""

    starts: tuple[str, ...]  # may be missing, as the prompt often ends with it
    ends: tuple[str, ...]
    call_starts: tuple[str, ...] = ()  # end the reasoning too, and belong to what follows
    tags: tuple[str, ...] = ()  # put around the content, and dropped
    trimmed: str = "\n"  # characters between markers and text that belong to neither


class Splitter:
    """opening: "open" (the text begins inside the reasoning), "maybe" (a marker says so) or "off" (all is content).

    bound: a grammar binds what follows the reasoning; nothing of it is trimmed or dropped.
    """

    def __init__(self, markers: Markers, opening: str, *, bound: bool = False) -> None:
        self._markers = markers
        self._is_open = opening == "open"
        self._bound = bound
        self._tags = () if bound else markers.tags
        self._all_ends = markers.ends + markers.call_starts
        self._held = ""  # not decided yet
        self._pieces: list[Piece] = []
        self._read: Callable[[], bool] = self._between if opening == "off" else self._start

    def feed(self, text: str) -> list[Piece]:
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
        found = find_first(text, self._all_ends)
        if found is None:
            self._pass_on(Reasoning, len(text) - held_back(text, self._all_ends, markers.trimmed))
            return False
        at, marker = found
        self._pass_on(Reasoning, at - num_trimmed(text, at, markers.trimmed))
        if marker in markers.call_starts:
            self._held, self._read = text[at:], self._content
        else:
            self._held, self._read = text[at + len(marker) :], self._content if self._bound else self._after
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
        self._held = self._held.lstrip(self._markers.trimmed if self._tags else "")
        if self._held:
            self._read = self._content
        return True

    def _content(self) -> bool:
        text = self._held
        found = find_first(text, self._tags)
        if found is None:
            keep = held_back(text, self._tags, self._markers.trimmed) if self._tags else 0
            self._pass_on(Content, len(text) - keep)
            return False
        at, tag = found
        self._pass_on(Content, at - num_trimmed(text, at, self._markers.trimmed))
        self._held, self._read = text[at + len(tag) :], self._between
        return True

    def _pass_on(self, kind: type[Reasoning] | type[Content], end: int) -> None:
        if end:
            self._pieces.append(kind(self._held[:end]))
        self._held = self._held[end:]
