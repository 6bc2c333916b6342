"""A stranger's value, as much of it as belongs into a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

MOST_SHOWN = 80  # characters
_ITEMS = 8  # of a list or object that are looked at


def shown(value: Any, most: int = MOST_SHOWN) -> str:
    """`repr(value)`, or the beginning of it. Takes the same time however large the value is."""
    text = _repr(value, most, most)
    return text if len(text) <= most + 2 else text[:most] + "…"


def clipped(text: str, most: int) -> str:
    """The text, or its beginning and its end."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]} ({len(text)} characters)"


def _repr(value: Any, most: int, depth: int) -> str:
    if isinstance(value, str):
        return repr(value) if len(value) <= most else repr(value[:most])[:-1] + "…"
    if isinstance(value, int | float | bool) or value is None:
        return repr(value) if not isinstance(value, int) or value.bit_length() <= 8 * most else "a huge integer"
    if depth == 0:
        return "…"
    if isinstance(value, Mapping):
        pairs = [
            f"{_repr(k, most, depth // 4)}: {_repr(v, most, depth // 4)}" for k, v in islice(value.items(), _ITEMS)
        ]
        return "{" + ", ".join(pairs + ["…"] * (len(value) > _ITEMS)) + "}"
    if isinstance(value, list | tuple):
        return _items(value, most, depth)
    return repr(bytes(value[:most])) if isinstance(value, bytes | bytearray) else repr(value)


def _items(values: Sequence[Any], most: int, depth: int) -> str:
    found = [_repr(item, most, depth // 4) for item in islice(values, _ITEMS)] + ["…"] * (len(values) > _ITEMS)
    inside = ", ".join(found)
    if isinstance(values, list):
        return f"[{inside}]"
    return f"({inside},)" if len(values) == 1 else f"({inside})"
