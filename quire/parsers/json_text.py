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


def pass_value(scanner: Scanner, emit: Callable[[str], None]) -> Step[bool | None]:
    """Reads an object, a list or a string, which begins here, and gives `emit` its text as it comes.

    Line breaks and tabs inside strings, which JSON forbids and models write, are escaped; all else is verbatim.
    None if it is cut off or a bracket does not fit; False if it has an end and is not JSON all the same.
    """
    whole: list[str] = []
    opened: list[str] = []

    def take(text: str) -> None:
        whole.append(text)
        emit(text)

    in_string = False
    while True:
        text, pos = scanner.text, scanner.pos
        run: list[str] = []
        while pos < len(text):
            if in_string:
                found = _INSIDE.match(text, pos)
                if found:
                    run.append(found.group())
                    pos = found.end()
                    continue
                char = text[pos]
                if char == "\\" and pos + 1 == len(text):
                    break  # what it escapes has not come
                if char == '"':
                    in_string = False
                    run.append(char)
                elif char != "\\":
                    run.append(_CONTROL.get(char) or f"\\u{ord(char):04x}")
                else:
                    run.append("\\\\")  # before a control character: a lone backslash
                pos += 1
            else:
                found = _OUTSIDE.match(text, pos)
                if found:
                    run.append(found.group())
                    pos = found.end()
                    continue
                char = text[pos]
                if char == '"':
                    in_string = True
                elif char in "{[":
                    opened.append(char)
                    if len(opened) > MAX_DEPTH:
                        break
                elif not opened or opened.pop() != _CLOSES[char]:
                    break
                run.append(char)
                pos += 1
            if not opened and not in_string:
                break
        scanner.pos = pos
        if run:
            take("".join(run))
        done = not opened and not in_string and bool(whole)
        if done:
            return is_json("".join(whole))
        if pos < len(text) and not (in_string and text[pos:] == "\\"):
            return None  # a bracket that does not fit
        if scanner.ended:
            if pos < len(text):
                scanner.pos = len(text)
                take("\\")
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
