"""JSON inside an answer: passed on as it comes, with its end found on the way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire.parsers.scanner import Scanner, Step

MAX_DEPTH = 128  # of values inside values; deeper ones are taken for broken
_OUTSIDE = re.compile(r'[^"{}\[\]]+')
_INSIDE = re.compile(r'(?:[^"\\\x00-\x1f]+|\\[^\x00-\x1f])+')
_PLAIN = re.compile(r"[^\s,\]}\"\[{]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CLOSES = {"}": "{", "]": "["}


def dumps(value: object) -> str:
    return without_surrogates(json.dumps(value, ensure_ascii=False))


def without_surrogates(text: str) -> str:
    """JSON text with halves of surrogate pairs, which no encoding takes, as escapes."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def escape(text: str) -> str:
    """As it stands inside a JSON string. Portions may be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def loads(text: str) -> object:
    """Raises ValueError for what is not JSON, NaN and Infinity included."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too deep") from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def is_object(text: str) -> bool:
    try:
        return isinstance(loads(text), dict)
    except ValueError:
        return False


def is_json(text: str) -> bool:
    try:
        loads(text)
    except ValueError:
        return False
    return True


class _Value:
    """How far an object, a list or a string has been read."""

    def __init__(self) -> None:
        self.opened: list[str] = []  # brackets
        self.in_string = False
        self.whole: list[str] = []

    @property
    def is_closed(self) -> bool:
        return not self.opened and not self.in_string

    def read(self, text: str, pos: int) -> tuple[str, int]:
        """What `text` adds from `pos` on, and where that ends: with the value, the text, or what does not fit."""
        run: list[str] = []
        while pos < len(text):
            found = (_INSIDE if self.in_string else _OUTSIDE).match(text, pos)
            if found:
                run.append(found.group())
                pos = found.end()
                continue
            char = text[pos]
            if self.in_string:
                if char == "\\" and pos + 1 == len(text):
                    break  # what it escapes has not come
                run.append(self._inside(char))
            elif self._outside(char):
                run.append(char)
            else:
                break
            pos += 1
            if self.is_closed:
                break
        self.whole += run
        return "".join(run), pos

    def _inside(self, char: str) -> str:
        """What stands for a character that no string may hold as it is."""
        if char == '"':
            self.in_string = False
            return char
        if char != "\\":
            return _CONTROL.get(char) or f"\\u{ord(char):04x}"
        return "\\\\"  # before a control character: a lone backslash

    def _outside(self, char: str) -> bool:
        """A quote or a bracket: whether it fits."""
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self.opened.append(char)
            return len(self.opened) <= MAX_DEPTH
        elif not self.opened or self.opened.pop() != _CLOSES[char]:
            return False
        return True


def pass_value(scanner: Scanner, emit: Callable[[str], None]) -> Step[bool | None]:
    """Reads an object, a list or a string, which begins here, and gives `emit` its text as it comes.

    Line breaks and tabs inside strings, which JSON forbids and models write, are escaped; all else is verbatim.
    None if it is cut off or a bracket does not fit; False if it has an end and is not JSON all the same.
    """
    value = _Value()
    while True:
        text = scanner.text
        run, pos = value.read(text, scanner.pos)
        scanner.pos = pos
        if run:
            emit(run)
        if value.is_closed and value.whole:
            return is_json("".join(value.whole))
        if pos < len(text) and not (value.in_string and text[pos:] == "\\"):
            return None  # a bracket that does not fit
        if scanner.ended:
            if pos < len(text):
                scanner.pos = len(text)
                emit("\\")
            return None
        yield


def read_value(scanner: Scanner) -> Step[str | None]:
    """Reads a JSON value of any type: its text. None if it is broken."""
    char = yield from scanner.char()
    parts: list[str] = []
    if char and char in '{["':
        whole = yield from pass_value(scanner, parts.append)
        return "".join(parts) if whole else None
    text = yield from scanner.word(_PLAIN)
    return text if text and is_json(text) else None


def read_string(scanner: Scanner) -> Step[str | None]:
    """Reads a JSON string: its value. None if there is none, or it is broken."""
    if (yield from scanner.char()) != '"':
        return None
    text = yield from read_value(scanner)
    value = loads(text) if text is not None else None
    return value if isinstance(value, str) else None
