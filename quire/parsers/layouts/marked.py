"""Calls between markers in a text of content: what all formats have in common.

White space that touches a call's markup belongs to it; all other text is content, verbatim. An opening marker that
turns out not to open a call is content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from quire.parsers.base import Parser
from quire.parsers.calls import PieceBuilder, new_call_id
from quire.parsers.layout import ContentReader, LayoutParser
from quire.parsers.layouts.structural import TextAndCalls
from quire.parsers.scanner import SPACE, Markers, Scanner, Step
from quire.types.reply import Tool
from quire.types.structured import GrammarSpec


@dataclass(frozen=True, kw_only=True)
class MarkedFormat(ABC):
    """A tool format that its markers declare; a layout adds how a call is read and what grammar holds it."""

    openings: tuple[str, ...]  # one of them begins a call, or a section of calls
    closings: tuple[str, ...] = ()  # ends it. The answer may end, or go on, without one
    frames: tuple[str, ...] = ()  # around content; dropped
    needs_special_tokens: bool = True
    separators: str = SPACE  # what may stand between calls and is no content
    new_id: Callable[[], str] = new_call_id

    @abstractmethod
    def read_section(
        self, scanner: Scanner, pieces: PieceBuilder, opening: str, tools: Sequence[Tool]
    ) -> Step[Section]:
        """Reads on from behind `opening`: calls, up to the closing marker or to where there is none.

        The scanner keeps what is read from the opening on; a layout that has read a call begins anew behind it.
        """

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool) -> TextAndCalls | None:
        """The calls as the model is trained to write them; None if the format or a tool's schema has no grammar."""

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> Parser:
        pieces = PieceBuilder(parallel, self.new_id)
        return LayoutParser(lambda scanner: _read_answer(self, scanner, pieces, tools), pieces)

    def constraint(self, tools: Sequence[Tool], *, required: bool, parallel: bool) -> GrammarSpec | None:
        grammar = self.grammar(tools, parallel=parallel)
        if grammar is None:
            return None
        return grammar.required() if required else grammar.auto(excluded=self.openings)

    @cached_property
    def in_content(self) -> Markers:
        return Markers((*self.openings, *self.frames))

    @cached_property
    def behind_call(self) -> Markers:
        """… while the closing marker of a call may still come."""
        return Markers((*self.openings, *self.frames, *self.closings))


@dataclass(frozen=True, slots=True)
class Section:
    """What came of an opening marker."""

    calls: int = 0
    closed: bool = False  # its closing marker has been read
    broken: bool = False  # what was read since the scanner's last `begin` is content after all


NOT_A_CALL = Section()


def _read_answer(form: MarkedFormat, scanner: Scanner, pieces: PieceBuilder, tools: Sequence[Tool]) -> Step[None]:
    content = ContentReader(scanner, pieces)
    markers = form.in_content
    while True:
        marker = yield from content.read(markers)
        if marker is None:
            return
        if marker not in form.openings:
            content.behind_call()
            if marker in form.closings:
                markers = form.in_content
            continue
        scanner.begin(scanner.pos - len(marker))
        section = yield from form.read_section(scanner, pieces, marker, tools)
        taken = scanner.taken()
        if section.calls:
            markers = form.in_content if section.closed else form.behind_call
            content.behind_call(form.separators)
        if section.broken or not section.calls:
            content.give_back(taken)
