"""A body's JSON looked over before objects are made of it: how deep, how many values, how long its texts."""

from __future__ import annotations

import re
from typing import NoReturn

import msgspec
import numpy as np

from quire.foundation.errors import ContextLengthError, InputError
from quire.foundation.shown import clipped

MAX_JSON_DEPTH = 64
MAX_VALUES = 1024 * 1024  # of a body's JSON
MAX_LISTS = 128 * 1024  # and objects
SCANNED_AT_ONCE = 256 * 1024  # bytes
MAX_NAME = 64  # characters of a field's, in a message
PROMPTS = frozenset(  # what a text becomes a part of a prompt as
    b"prompt content text input inputs system instructions query queries documents thinking summary arguments".split()
)
_KEY = re.compile(rb'"(\w+)"\s*:\s*$')
_KEY_BYTES = 80  # that a key and what stands around it take
_QUOTE, _COMMA = b'",'
_NESTING = np.zeros(256, np.int8)  # of JSON's bytes, outside of strings
_NESTING[list(b"[{")], _NESTING[list(b"]}")] = 1, -1
_IS_MARK = _NESTING != 0
_IS_MARK[[_QUOTE, _COMMA]] = True


def check_shape(body: bytes | bytearray, most_chars: int | None = None) -> None:
    """Read off the bytes, a piece at a time: between pieces other threads go on.

    Args:
        most_chars: that a prompt may have; None: not known.

    Raises:
        InputError: the JSON is nested deeper than MAX_JSON_DEPTH (templates and schemas recurse over it), has more
            values than Python makes objects of in a moment, or a text in it is longer than any prompt may be.
    """
    if len(body) <= MAX_VALUES and body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    start, values, lists, depth, in_text = 0, 1, 0, 0, 0
    open_text = _OpenText(body, most_chars)
    while start < len(body):
        end = start + SCANNED_AT_ONCE
        while body[end - 1 : end] == b"\\" and end < len(body):
            end += 1  # an escape is in one piece
        piece = body[start:end]
        text = np.frombuffer(piece.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        marks = text[_IS_MARK.take(text)]
        is_text = ((np.cumsum(marks == _QUOTE) + in_text) & 1).astype(bool)
        nesting = np.where(is_text, 0, _NESTING.take(marks))
        depths = depth + np.cumsum(nesting)
        values += int(np.count_nonzero((marks == _COMMA) & ~is_text))
        lists += int(np.count_nonzero(nesting == 1))
        if depths.max(initial=0) > MAX_JSON_DEPTH:
            raise InputError(f"the JSON body is nested deeper than {MAX_JSON_DEPTH} levels")
        if values > MAX_VALUES or lists > MAX_LISTS:
            _refuse_shape(body)
        if len(marks):
            depth, in_text = int(depths[-1]), int(is_text[-1])
        open_text.take(piece, text, is_open=bool(in_text))
        start = end


class _OpenText:
    """The text that the pieces so far end in, and how many characters it has at least."""

    def __init__(self, body: bytes | bytearray, most: int | None) -> None:
        self._body, self._most = body, most
        self._before = b""  # what stands before it
        self._end = b""  # what the pieces so far end with: a key may lie in two of them
        self._chars = 0

    def take(self, piece: bytes | bytearray, text: np.ndarray, *, is_open: bool) -> None:
        """text: the piece without escaped quotes and backslashes. is_open: it ends inside a text.

        Raises ContextLengthError if that is no prompt's.
        """
        if self._most is None:
            return
        quotes, before = np.flatnonzero(text == _QUOTE), self._end
        self._end = (before + text[-_KEY_BYTES:].tobytes())[-_KEY_BYTES:]
        if not is_open:
            return
        if len(quotes):
            opening = int(quotes[-1])
            self._before = (before + text[max(0, opening - _KEY_BYTES) : opening].tobytes())[-_KEY_BYTES:]
            self._chars = 0
            return
        self._chars += _least_chars(piece, text)
        if self._chars > self._most and self._is_prompt():
            raise ContextLengthError.of_chars(self._chars, self._most, is_more=True)

    def _is_prompt(self) -> bool:
        key = _KEY.search(self._before)
        # An item of a list may be an embedding.
        return b'"prompt_embeds"' not in self._body if key is None else key[1] in PROMPTS


def _least_chars(piece: bytes | bytearray, text: np.ndarray) -> int:
    """Characters that a piece of a text stands for, or fewer: a pair of surrogates is one, in twelve bytes."""
    removed = (len(piece) - len(text)) // 2
    encoded = int(np.count_nonzero((text & 0xC0) != 0x80))  # bytes that go on with a character are none
    escapes = int(np.count_nonzero(text == ord("\\")))
    long_ones = piece.count(rb"\u") if escapes else 0
    return removed + encoded - escapes - -(-long_ones * 9 // 2)


def _refuse_shape(body: bytes | bytearray) -> NoReturn:
    """Naming the field that has the most."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = {}
    name = max(fields, key=lambda name: memoryview(fields[name]).nbytes, default=None)
    raise InputError(
        f"{clipped(name or 'the body', MAX_NAME)} holds too much: a body may have {MAX_VALUES} values, and "
        f"{MAX_LISTS} objects and lists",
        None if name is None else clipped(name, MAX_NAME),
    )
