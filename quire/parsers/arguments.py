"""Writes a call's arguments as one JSON object, argument by argument, as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.parsers.calls import PieceBuilder
from quire.parsers.json_text import dumps, escape
from quire.parsers.scanner import Markers, Scanner, Step
from quire.parsers.typed import NULLABLE_STRING, STRING, is_choice, is_null_so_far, json_of, properties_of, types_of
from quire.types.reply import Tool


class ArgumentWriter:
    """Of a call that begins now. `tools` type what is written as bare text."""

    def __init__(self, pieces: PieceBuilder, tools: Sequence[Tool], name: str, call_id: str | None = None) -> None:
        self._pieces = pieces
        self.root, self._properties = properties_of(tools, name)
        self._is_empty = True
        pieces.start(name, call_id)

    def schema(self, key: str) -> object:
        """Of the argument `key`; None if the tool does not say. References point into `root`."""
        return self._properties.get(key)

    def emit(self, text: str) -> None:
        self._pieces.arguments(text)

    def key(self, key: str) -> None:
        """The value of `key` comes next."""
        self.emit(f"{'{' if self._is_empty else ', '}{dumps(key)}: ")
        self._is_empty = False

    def end(self) -> None:
        self.emit("{}" if self._is_empty else "}")
        self._pieces.end()

    def read_bare(self, scanner: Scanner, key: str, end: ValueEnd) -> Step[bool]:
        """Reads the value of `key`, written as bare text, and over its end. False if that does not come."""
        types = types_of(self.schema(key), self.root)
        if types == STRING:
            return (yield from self.read_string(scanner, key, end))
        if types == NULLABLE_STRING:
            return (yield from self._read_nullable_string(scanner, key, end))
        parts: list[str] = []
        if not (yield from end.read(scanner, parts.append)):
            return False
        text = "".join(parts)
        self.key(key)
        self.emit(dumps(text) if is_choice(text, self.schema(key), self.root) else json_of(text, types))
        return True

    def _read_nullable_string(self, scanner: Scanner, key: str, end: ValueEnd) -> Step[bool]:
        """As it comes, once it cannot be null."""
        held = ""
        begun = False

        def take(text: str) -> None:
            nonlocal held, begun
            if begun:
                self.emit(escape(text))
                return
            held += text
            if not is_null_so_far(held):
                begun = True
                self.emit(f'"{escape(held)}')

        self.key(key)
        if not (yield from end.read(scanner, take)):
            return False
        self.emit('"' if begun else json_of(held, NULLABLE_STRING))
        return True

    def read_string(self, scanner: Scanner, key: str, end: ValueEnd) -> Step[bool]:
        self.key(key)
        self.emit('"')
        if not (yield from end.read(scanner, lambda text: self.emit(escape(text)))):
            return False
        self.emit('"')
        return True

    def read_json(self, scanner: Scanner, key: str, end: ValueEnd) -> Step[bool]:
        """As read_bare, of a value that is written as JSON; what is not JSON is a string."""
        parts: list[str] = []
        if not (yield from end.read(scanner, parts.append)):
            return False
        self.key(key)
        self.emit(json_of("".join(parts), frozenset()))
        return True


class ValueEnd:
    """Where a value written as bare text ends: a marker, behind which only certain others may follow.

    So the marker may also stand inside the value. `padding` around the value is no part of it.
    """

    def __init__(self, marker: str, followers: Sequence[str], padding: str = "") -> None:
        self._marker = marker
        self._padding = Markers([padding]) if padding else None
        self._ends = Markers([padding + marker, marker])
        self._followers = Markers(followers)

    def read(self, scanner: Scanner, emit: Callable[[str], None]) -> Step[bool]:
        if self._padding is not None:
            yield from scanner.marker(self._padding)
        while True:
            found = yield from scanner.pass_until(self._ends, emit)
            if found is None:
                return False
            if (yield from scanner.follows(self._followers)):
                return True
            emit(found)
