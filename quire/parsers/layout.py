"""A parser that runs a layout: a generator over a scanner that puts what it finds into pieces."""

from __future__ import annotations

from collections.abc import Callable

from quire.parsers.calls import PieceBuilder
from quire.parsers.scanner import SPACE, Markers, Scanner, Step
from quire.types.reply import Content, Piece


class LayoutParser:
    """Of one answer, once."""

    def __init__(self, layout: Callable[[Scanner], Step[None]], pieces: PieceBuilder) -> None:
        self._scanner = Scanner()
        self._pieces = pieces
        self._run = layout(self._scanner)
        next(self._run)

    def feed(self, text: str) -> list[Piece]:
        suspects = self._scanner.suspects
        if suspects is not None and text and not suspects(text):
            self._pieces.has_content = True
            return [Content(text)]
        self._scanner.add(text)
        next(self._run)
        return self._pieces.drain()

    def finish(self) -> list[Piece]:
        self._scanner.ended = True
        for _ in self._run:
            raise RuntimeError("a layout waits for more text behind the end")
        return self._pieces.drain()


class ContentReader:
    """Passes content on as it comes, and keeps back the space that may belong to the markup of a call.

    Space that touches a call is dropped, but for the first of it where text stands on both sides: that stays between.
    """

    def __init__(self, scanner: Scanner, pieces: PieceBuilder) -> None:
        self._scanner = scanner
        self._pieces = pieces
        self._trim = ""  # behind a call: what is no content before the next text
        self._gap = ""  # … and the space that stands between it and the text before
        self._space = ""  # before the marker that was read last

    def behind_call(self, trim: str = SPACE) -> None:
        """What the last marker began was a call, or other markup. trim: what belongs to it if it comes next."""
        self._trim = trim
        self._gap = self._gap or self._space
        self._space = ""

    def give_back(self, text: str) -> None:
        """`text`, from the last marker on or behind a call, was taken for markup and is content."""
        space, self._space = self._space, ""
        self._pass(space, text)

    def read(self, markers: Markers) -> Step[str | None]:
        """Passes on what stands before the next of `markers`, and reads that. None at the end of the text."""
        scanner = self._scanner
        held = ""  # space: of the next marker, if one follows
        while True:
            text, pos = scanner.text, scanner.pos
            found = markers.search(text, pos)
            if found:
                end = found.start()
            else:
                end = len(text) if scanner.ended else markers.undecided(text, pos)
            portion = text[pos:end]
            if self._trim:
                rest = portion.lstrip(self._trim)
                held += "".join(char for char in portion[: len(portion) - len(rest)] if char in SPACE)
                portion = rest
            body = portion.rstrip(SPACE)
            if body:
                self._pass(held, body)
                held = ""
            held += portion[len(body) :]
            scanner.pos = end
            scanner.suspects = None
            if found:
                scanner.pos = found.end()
                self._space = held
                return found.group()
            if scanner.ended:
                if not self._trim:
                    self._pieces.content(held)
                return None
            if not held and not self._trim and end == len(text):
                scanner.suspects = markers.suspects
            yield

    def _pass(self, space: str, text: str) -> None:
        """Content, and the space before it."""
        if self._trim:
            space = (self._gap or space) if self._pieces.has_content else ""
            self._trim = self._gap = ""
        self._pieces.content(space + text)
