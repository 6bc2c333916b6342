"""A parser that runs a layout: a generator over a scanner that puts what it finds into pieces."""

from __future__ import annotations

from collections.abc import Callable

from quire.frontend.parsers.calls import Pieces
from quire.frontend.parsers.scanner import SPACE, Markers, Scanner, Step
from quire.types.reply import Content, Piece


class LayoutParser:
    """Of one answer, once."""

    def __init__(self, layout: Callable[[Scanner], Step[None]], pieces: Pieces) -> None:
        self._scanner = Scanner()
        self._pieces = pieces
        self._run = layout(self._scanner)
        next(self._run)

    def feed(self, text: str) -> list[Piece]:
        suspects = self._scanner.suspects
        if suspects is not None and text and not suspects(text):
            return [Content(text)]
        self._scanner.add(text)
        next(self._run)
        return self._pieces.drain()

    def finish(self) -> list[Piece]:
        self._scanner.ended = True
        for _ in self._run:
            raise RuntimeError("a layout waits for more text behind the end")
        return self._pieces.drain()


def pass_content(scanner: Scanner, pieces: Pieces, markers: Markers, trim: str) -> Step[tuple[str, str] | None]:
    """Passes content on up to the next marker, which it reads: the marker and the space before it. None at the end.

    trim: characters that are dropped before the content begins.
    """
    held = ""  # space: of the next marker, if one follows
    while True:
        text, pos = scanner.text, scanner.pos
        found = markers.search(text, pos)
        if found:
            end = found.start()
        else:
            end = len(text) if scanner.ended else markers.undecided(text, pos)
        portion = text[pos:end]
        if trim:
            portion = portion.lstrip(trim)
        if portion:
            trim = ""
            body = portion.rstrip(SPACE)
            if body:
                pieces.content(held + body)
                held = portion[len(body) :]
            else:
                held += portion
        scanner.pos = end
        if found:
            scanner.pos = found.end()
            scanner.suspects = None
            return found.group(), held
        if scanner.ended:
            pieces.content(held)
            return None
        scanner.suspects = None if held or trim or end < len(text) else markers.suspects
        yield
