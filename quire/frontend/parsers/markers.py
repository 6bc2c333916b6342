"""Where markers stand in a text that comes in portions."""

from __future__ import annotations

from collections.abc import Sequence

MAX_TRIMMED = 8  # characters trimmed in front of a marker; more have been passed on when the marker comes


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The first marker in `text`; of several at one place the longest."""
    found: tuple[int, str] | None = None
    for marker in markers:
        at = text.find(marker)
        if at >= 0 and (found is None or (at, -len(marker)) < (found[0], -len(found[1]))):
            found = at, marker
    return found


def held_back(text: str, markers: Sequence[str], trimmed: str = "") -> int:
    """How many characters at the end of `text` may still belong to a marker, or be trimmed in front of one."""
    kept = 0
    for marker in markers:
        first = marker[0]
        at = text.find(first, max(0, len(text) - len(marker) + 1))
        while at >= 0:
            if marker.startswith(text[at:]):
                kept = max(kept, len(text) - at)
                break
            at = text.find(first, at + 1)
    return kept + num_trimmed(text, len(text) - kept, trimmed)


def num_trimmed(text: str, end: int, trimmed: str) -> int:
    """How many of the characters in front of `end` are among `trimmed`, at most MAX_TRIMMED."""
    count = 0
    while count < min(MAX_TRIMMED, end) and text[end - count - 1] in trimmed:
        count += 1
    return count
