"""Reading a text that comes in portions: a layout is written as if the text were all there, and waits with `yield`.

A layout is a generator over a `Scanner`. What it decides depends on the text alone and never on where a portion ends,
so that any cut gives the same pieces. What has been read is never read again: the time is linear in the text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]  # yields when it needs more text; returns its result

SPACE = " \t\r\n"
LINE = re.compile(r"[^<>\n]*")  # where names stand
_SPACES = re.compile(r"[ \t\r\n]*")


class Markers:
    """A few fixed strings to look for at once; none begins with another."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.all = tuple(sorted(set(markers)))
        for one, next_one in itertools.pairwise(self.all):
            if not one or next_one.startswith(one):
                raise ValueError(f"of two markers none may begin the other: {one!r}, {next_one!r}")
        firsts = re.escape("".join(sorted({marker[0] for marker in self.all})))
        self.search = re.compile("|".join(map(re.escape, self.all)) or r"(?!)").search
        # A marker whose end has not come yet: its first characters up to the end of the text.
        self._beginning = re.compile("|".join(map(_prefixes, self.all)) or r"(?!)").search
        # What a portion of plain text must be looked at for: markers, and space, which may belong to one.
        self.suspects = re.compile(rf"[{firsts}]|[ \t\r\n]\Z" if firsts else r"[ \t\r\n]\Z").search

    def undecided(self, text: str, start: int) -> int:
        """Where the end of `text` begins that may still become a marker; its length if there is none."""
        found = self._beginning(text, start)
        return found.start() if found else len(text)

    def at(self, text: str, start: int) -> str | None:
        """The marker that stands at `start`."""
        return next((marker for marker in self.all if text.startswith(marker, start)), None)

    def may_be_at(self, text: str, start: int) -> bool:
        """Whether all of `text` from `start` on is the beginning of a marker."""
        rest = text[start:]
        return any(marker.startswith(rest) for marker in self.all)


def _prefixes(marker: str) -> str:
    r"""A regex for all beginnings of `marker` at the end of a text: a, ab, … as a(?:b(?:c)?)?\Z."""
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return rf"{re.escape(marker[0])}{pattern}\Z"


class Scanner:
    """The text that has come and not been read: `text` from `pos` on."""

    __slots__ = ("_from", "_taken", "ended", "pos", "suspects", "text")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False  # no more text will come
        self.suspects: Callable[[str], object] | None = None  # while plain text passes: what would not be plain
        self._taken: list[str] | None = None  # what was read since `begin`
        self._from = 0

    def add(self, text: str) -> None:
        if self._taken is not None:
            self._taken.append(self.text[self._from : self.pos])
            self._from = 0
        self.text = self.text[self.pos :] + text if self.pos < len(self.text) else text
        self.pos = 0

    def begin(self, start: int) -> None:
        """From `start` on, keep what is read: it may have to be given back as content."""
        self._taken = []
        self._from = start

    def taken(self) -> str:
        """What was read since `begin`; it is kept no longer."""
        taken = "".join((*(self._taken or ()), self.text[self._from : self.pos]))
        self._taken = None
        return taken

    def skip_space(self) -> Step[None]:
        while True:
            found = _SPACES.match(self.text, self.pos)
            self.pos = found.end() if found else self.pos
            if self.pos < len(self.text) or self.ended:
                return
            yield

    def char(self) -> Step[str]:
        """The next character, not read yet; "" at the end."""
        while self.pos == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    def marker(self, markers: Markers) -> Step[str | None]:
        """Reads one of `markers` if it is next."""
        while True:
            found = markers.at(self.text, self.pos)
            if found is not None:
                self.pos += len(found)
                return found
            if self.ended or not markers.may_be_at(self.text, self.pos):
                return None
            yield

    def word(self, pattern: re.Pattern[str]) -> Step[str]:
        """Reads all that `pattern`, a repeated character class, takes."""
        parts = []
        while True:
            found = pattern.match(self.text, self.pos)
            if found:
                parts.append(found.group())
                self.pos = found.end()
            if self.pos < len(self.text) or self.ended:
                return "".join(parts)
            yield

    def head(self, pattern: re.Pattern[str], ends: Markers) -> Step[tuple[str, str] | None]:
        """Reads a word (see `word`) and the marker behind it. None if none of `ends` follows."""
        word = yield from self.word(pattern)
        end = yield from self.marker(ends)
        return None if end is None else (word, end)

    def until(self, markers: Markers, limit: int) -> Step[tuple[str, str] | None]:
        """Reads up to the next marker and over it: what stood before it, and which it is.

        None if it does not end within `limit` characters; then nothing is read.
        """
        while True:
            found = markers.search(self.text, self.pos, self.pos + limit)
            if found:
                before = self.text[self.pos : found.start()]
                self.pos = found.end()
                return before, found.group()
            if self.ended or len(self.text) - self.pos >= limit:
                return None
            yield

    def follows(self, markers: Markers, space: int = 64) -> Step[bool]:
        """Whether one of `markers`, or the end, comes next behind at most `space` of space. Reads nothing."""
        while True:
            found = _SPACES.match(self.text, self.pos, self.pos + space)
            at = found.end() if found else self.pos
            if at == len(self.text):
                if self.ended:
                    return True
            elif markers.at(self.text, at) is not None:
                return True
            elif self.ended or not markers.may_be_at(self.text, at):
                return False
            if at - self.pos >= space:
                return False
            yield

    def pass_until(
        self, markers: Markers, emit: Callable[[str], None], *, are_tokens: bool = False
    ) -> Step[str | None]:
        """Gives `emit` the text up to the next marker as it comes, and reads over the marker.

        None if the text ends before: an end that could have become a marker is dropped. are_tokens: a marker is one
        token, so that half of one is text.
        """
        while True:
            found = markers.search(self.text, self.pos)
            end = found.start() if found else markers.undecided(self.text, self.pos)
            if end > self.pos:
                emit(self.text[self.pos : end])
                self.pos = end
            if found:
                self.pos = found.end()
                return found.group()
            if self.ended:
                if are_tokens and end < len(self.text):
                    emit(self.text[end:])
                self.pos = len(self.text)
                return None
            yield
