"""An answer on the screen while it comes: as text, or in a terminal as the markdown it is."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class View:
    """Only the last paragraph is drawn anew as it grows: what stands above it stays, and scrolls like any text."""

    def __init__(self, wants_markdown: bool) -> None:
        self._is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._is_markdown = wants_markdown and self._is_terminal
        self._text = ""  # of the paragraph that grows
        self._is_thinking = False
        self._console: Console | None = None
        self._live: Live | None = None

    def think(self, piece: str) -> None:
        """Reasoning: dim in a terminal, and nothing where only answers are wanted."""
        if self._is_terminal:
            print(piece if self._is_thinking else DIM + piece, end="", flush=True)
            self._is_thinking = True

    def add(self, piece: str) -> None:
        if not piece:
            return
        if self._is_thinking:
            print(PLAIN + "\n", flush=True)
            self._is_thinking = False
        if not self._is_markdown:
            print(piece, end="", flush=True)
            return
        done, self._text = split_done(self._text + piece)
        if done:
            self._draw(done)
            self._stop()
        self._draw(self._text)

    def close(self) -> None:
        if self._is_thinking:
            print(PLAIN, end="")
        if self._is_markdown:
            self._draw(self._text)
            self._stop()
        else:
            print(flush=True)

    def _draw(self, text: str) -> None:
        if not text.strip():
            return
        from rich.console import Console
        from rich.live import Live
        from rich.markdown import Markdown

        if self._live is None:
            self._console = self._console or Console()
            # What is taller than the screen cannot be drawn anew: it is cut while it grows, and whole at its end.
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="ellipsis")
            self._live.start()
        # Lines stay lines (two spaces at their end): models mean them, in verses and lists.
        self._live.update(Markdown(text.replace("\n", "  \n")), refresh=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.vertical_overflow = "visible"
            self._live.stop()
            self._live = None


def split_done(text: str) -> tuple[str, str]:
    """What will not change any more, and the paragraph that grows: cut at the last empty line outside of code."""
    cut, is_code, position = 0, False, 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        if line.lstrip().startswith(("```", "~~~")):
            is_code = not is_code
        elif not line.strip() and line.endswith("\n") and not is_code:
            cut = position
    return text[:cut], text[cut:]
