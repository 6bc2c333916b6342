"""A large value on its way to another process, in pieces so small that neither side is busy for long with any of them.

A piece is a tag and a body: a small value as msgpack, items of a list, entries of a dict, a part of a text or of an
array. `pieces_of` writes them, `Pieces` puts them together again. Objects are written as a tag and a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

PIECE = 16 * 1024  # bytes of text or of an array in one piece
MANY = 512  # values in one piece
_ANY = msgspec.msgpack.Decoder()
_encode = msgspec.msgpack.encode
_CHARS_A_VALUE = 16  # a text counts as so many values


def no_object(value: Any) -> tuple[str, Any]:
    raise TypeError(f"objects of type {type(value).__name__} are not sent")


def pieces_of(value: Any, taken_apart: Callable[[Any], tuple[str, Any]] = no_object) -> Iterator[bytes]:
    """The pieces of a value: None, numbers, texts, lists, dicts with keys that are texts, arrays.

    taken_apart: an object's tag and the value that it is made of. Raises TypeError for what cannot be sent.
    """
    if weight(value, MANY) <= MANY:
        yield b"v" + _encode(value)
    elif type(value) is str:
        # Pieces of a text hold whole characters.
        yield b"s"
        for start in range(0, len(value), PIECE // 4):
            yield b"t" + value[start : start + PIECE // 4].encode()
        yield b"."
    elif isinstance(value, list | tuple):
        yield b"["
        for is_small, items in grouped(list(value)):
            if is_small:
                yield b"i" + _encode(items)
            else:
                yield from pieces_of(items[0], taken_apart)
        yield b"."
    elif type(value) is dict:
        yield b"{"
        for is_small, entries in grouped(list(value.items())):
            if is_small:
                yield b"e" + _encode(dict(entries))
            else:
                yield b"k" + entries[0][0].encode()
                yield from pieces_of(entries[0][1], taken_apart)
        yield b"."
    elif isinstance(value, np.ndarray):
        yield b"a" + _encode([value.dtype.str, list(value.shape)])
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        for start in range(0, len(raw), PIECE):
            yield b"d" + raw[start : start + PIECE].tobytes()
        yield b"."
    else:
        tag, inner = taken_apart(value)
        yield b"o" + tag.encode()
        yield from pieces_of(inner, taken_apart)
        yield b"."


def grouped(items: list[Any]) -> Iterator[tuple[bool, list[Any]]]:
    """In order: items that are small, as many as go into a piece; each of the others alone."""
    group: list[Any] = []
    total = 0
    for item in items:
        size = weight(item, MANY)
        if group and total + size > MANY:
            yield True, group
            group, total = [], 0
        if size > MANY:
            yield False, [item]
        else:
            group.append(item)
            total += size
    if group:
        yield True, group


def weight(value: Any, most: int) -> int:
    """Of a value as values; more than `most` if it has more, or holds what msgpack does not."""
    kind = type(value)
    if value is None or kind in (int, float, bool):
        return 1 if kind is not int or -(2**63) <= value < 2**64 else most + 1
    if kind is str:
        return 1 + len(value) // _CHARS_A_VALUE
    if kind is dict:
        inside: Any = value.values()
        total = 1 + len(value) + sum(map(len, value)) // _CHARS_A_VALUE if len(value) <= most else most + 1
    elif kind in (list, tuple):
        inside, total = value, 1
    else:
        return most + 1
    if len(value) > most:
        return most + 1
    for item in inside:
        total += weight(item, most - total)
        if total > most:
            return total
    return total


class Pieces:
    """Puts a value together. objects: makes one of each tag."""

    def __init__(self, objects: Mapping[str, Callable[[Any], Any]] | None = None) -> None:
        self._objects = objects or {}
        self._open: list[_Open] = []
        self.value: Any = None
        self.is_whole = False

    def add(self, piece: bytes) -> None:
        """The next piece. Raises ValueError if it does not belong there."""
        tag, body = piece[:1], memoryview(piece)[1:]
        top = self._open[-1] if self._open else None
        match tag:
            case b"v":
                self._put(_ANY.decode(body))
            case b"s" | b"[" | b"{":
                self._open.append(_Open(tag, {} if tag == b"{" else []))
            case b"a":
                dtype, shape = _ANY.decode(body)
                self._open.append(_Open(tag, np.empty(shape, dtype)))
            case b"o":
                self._open.append(_Open(tag, None, bytes(body).decode()))
            case b".":
                self._put(self._closed(self._open.pop()))
            case _ if top is None:
                raise ValueError("a piece of nothing")
            case b"t":
                top.value.append(str(body, "utf-8"))
            case b"i":
                top.value.extend(_ANY.decode(body))
            case b"e":
                top.value.update(_ANY.decode(body))
            case b"k":
                top.name = str(body, "utf-8")
            case b"d":
                flat = top.value.reshape(-1).view(np.uint8)
                flat[top.filled : top.filled + len(body)] = np.frombuffer(body, np.uint8)
                top.filled += len(body)
            case _:
                raise ValueError(f"unknown piece {tag!r}")

    def _put(self, value: Any) -> None:
        if not self._open:
            self.value, self.is_whole = value, True
            return
        top = self._open[-1]
        if top.tag == b"[":
            top.value.append(value)
        elif top.tag == b"{":
            top.value[top.name] = value
        else:
            top.value = value

    def _closed(self, part: _Open) -> Any:
        if part.tag == b"s":
            return "".join(part.value)
        return self._objects[part.name](part.value) if part.tag == b"o" else part.value


class _Open:
    """What is being put together. name: of an object's tag, or of the key whose value comes next."""

    __slots__ = ("filled", "name", "tag", "value")

    def __init__(self, tag: bytes, value: Any, name: str = "") -> None:
        self.tag, self.value, self.name, self.filled = tag, value, name, 0
