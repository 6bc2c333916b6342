"""Values written as in a programming language, read as they come and written as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from quire.parsers.json_text import MAX_DEPTH, dumps, escape, is_json, loads
from quire.parsers.scanner import Markers, Scanner, Step

Emit = Callable[[str], None]
_WORD = re.compile(r"[A-Za-z0-9_.+\-]*")
_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9_]*)?(?:\.[0-9_]*)?(?:[eE][+-]?[0-9]+)?")
_KEY = re.compile(r"[^\s:,{}\[\]()<>\"'=]*")
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")
_INSIDE = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_AFTER_STRING = Markers([",", ")", "]", "}", ":"])
_CLOSE = {"[": "]", "(": ")", "{": "}"}


@dataclass(frozen=True)
class Literals:
    """A syntax of values: strings, numbers, names of constants, lists and objects, one inside the other."""

    constants: dict[str, str] = field(
        default_factory=lambda: {
            "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"
        }
    )  # fmt: skip
    quote: str = ""  # a marker around strings, which have no escapes then; "": quotes and backslashes as in Python
    bare_keys: bool = False  # keys of objects are words without quotes

    def read(self, scanner: Scanner, emit: Emit, depth: int = 0) -> Step[bool]:
        """Reads a value and gives `emit` its JSON text as it comes. False if it is none, or is cut off."""
        if self.quote and (yield from scanner.marker(self._quotes)) is not None:
            return (yield from self._read_raw_string(scanner, emit))
        char = yield from scanner.char()
        if char and char in "\"'" and not self.quote:
            scanner.pos += 1
            emit('"')
            if not (yield from _read_string(scanner, char, emit)):
                return False
            emit('"')
            return True
        if char and char in _CLOSE:
            return (yield from self._read_container(scanner, emit, depth + 1))
        return (yield from self._read_word(scanner, emit))

    def _read_raw_string(self, scanner: Scanner, emit: Emit) -> Step[bool]:
        emit('"')
        if (yield from scanner.pass_until(self._quotes, lambda text: emit(escape(text)))) is None:
            return False
        emit('"')
        return True

    def _read_word(self, scanner: Scanner, emit: Emit) -> Step[bool]:
        word = yield from scanner.word(_WORD)
        text = self.constants.get(word) or _number(word)
        if text is None:
            return False
        emit(text)
        return True

    def _read_container(self, scanner: Scanner, emit: Emit, depth: int) -> Step[bool]:
        opening = scanner.text[scanner.pos]
        scanner.pos += 1
        closing = _CLOSE[opening]
        if depth > MAX_DEPTH:
            return False
        emit("{" if opening == "{" else "[")
        count = 0
        while True:
            yield from scanner.skip_space()
            if (yield from scanner.char()) == closing:
                break
            if count:
                emit(", ")
            if opening == "{" and not (yield from self._read_key(scanner, emit)):
                return False
            if not (yield from self.read(scanner, emit, depth)):
                return False
            count += 1
            yield from scanner.skip_space()
            char = yield from scanner.char()
            if char == ",":
                scanner.pos += 1
            elif char != closing:
                return False
        scanner.pos += 1
        emit("}" if opening == "{" else "]")
        return True

    def _read_key(self, scanner: Scanner, emit: Emit) -> Step[bool]:
        """The key of an entry and what follows it up to the value."""
        key = yield from self.read_key(scanner)
        if key is None:
            return False
        emit(f"{dumps(key)}: ")
        yield from scanner.skip_space()
        if (yield from scanner.char()) != ":":
            return False
        scanner.pos += 1
        yield from scanner.skip_space()
        return True

    def read_key(self, scanner: Scanner) -> Step[str | None]:
        char = yield from scanner.char()
        if self.bare_keys and not (char == self.quote[:1] and char):
            return (yield from scanner.word(_KEY)) or None
        parts: list[str] = []
        if not (yield from self.read(scanner, parts.append)):
            return None
        value = loads("".join(parts))
        return value if isinstance(value, str) else "".join(parts)

    @cached_property
    def _quotes(self) -> Markers:
        return Markers([self.quote])


def _read_string(scanner: Scanner, quote: str, emit: Emit) -> Step[bool]:
    """From behind the opening quote to behind the closing one; what stands between, as JSON."""
    while True:
        found = _INSIDE[quote].match(scanner.text, scanner.pos)
        if found:
            emit(escape(found.group()))
            scanner.pos = found.end()
        char = yield from scanner.char()
        if not char:
            return False
        if char == quote:
            scanner.pos += 1
            if (yield from scanner.follows(_AFTER_STRING)):
                return True
            emit(escape(quote))  # as in 'it's': models do not always escape
        if char == "\\" and not (yield from _read_escape(scanner, emit)):
            return False


def _read_escape(scanner: Scanner, emit: Emit) -> Step[bool]:
    """A backslash and what it stands for. False at the end."""
    while len(scanner.text) - scanner.pos < 2:
        if scanner.ended:
            return False
        yield
    char = scanner.text[scanner.pos + 1]
    count = _HEX_DIGITS.get(char, 0)
    while count and len(scanner.text) - scanner.pos < 2 + count and not scanner.ended:
        yield
    start = scanner.pos + 2
    digits = scanner.text[start : start + count]
    if count and len(digits) == count and _HEX.fullmatch(digits) and int(digits, 16) < 0x110000:
        # JSON has pairs of surrogates, as these models write them.
        emit(f"\\u{digits}" if char == "u" else dumps(chr(int(digits, 16)))[1:-1])
        scanner.pos = start + count
        return True
    if char in _SIMPLE:
        emit(escape(_SIMPLE[char]))
    elif char in "\\\"'/":
        emit(escape(char))
    else:  # no escape: both characters stand for themselves, as in Python
        emit(escape("\\" + char))
    scanner.pos += 2
    return True


def _number(word: str) -> str | None:
    """As JSON writes it."""
    if not any(char.isdecimal() for char in word) or not _NUMBER.fullmatch(word):
        return None
    text = word.replace("_", "").removeprefix("+")
    if is_json(text):
        return text
    try:
        number = float(text)
    except ValueError:  # as in "e5", which has no digits where it needs them
        return None
    return repr(number) if math.isfinite(number) else None
