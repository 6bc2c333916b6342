"""JSON that is written in parts, none of which takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from quire.foundation.value_pieces import MANY, grouped, weight

_CHARS = 16 * 1024  # of a text, in one part
_TURN = 32 * 1024  # bytes written before others get a turn


async def json_parts(value: Any) -> list[bytes]:
    """Of a value as orjson takes it, arrays too; most values are one part."""
    if weight(value, MANY) <= MANY:
        return [orjson.dumps(value)]
    parts: list[bytes] = []
    size = 0
    for part in _parts(value):
        parts.append(part)
        size += len(part)
        if size > _TURN:
            size = 0
            await asyncio.sleep(0)
    return parts


def _parts(value: Any) -> Iterator[bytes]:
    if weight(value, MANY) <= MANY:
        yield orjson.dumps(value)
    elif isinstance(value, str):
        yield b'"'
        for start in range(0, len(value), _CHARS):
            yield orjson.dumps(value[start : start + _CHARS])[1:-1]
        yield b'"'
    elif isinstance(value, np.ndarray) and value.ndim == 1:
        yield b"["
        for start in range(0, len(value), MANY):
            yield (b"," if start else b"") + orjson.dumps(
                np.ascontiguousarray(value[start : start + MANY]), option=orjson.OPT_SERIALIZE_NUMPY
            )[1:-1]
        yield b"]"
    elif isinstance(value, dict):
        yield b"{"
        for number, (key, item) in enumerate(value.items()):
            yield (b"," if number else b"") + orjson.dumps(key) + b":"
            yield from _parts(item)
        yield b"}"
    elif isinstance(value, list | tuple | np.ndarray):
        yield b"["
        for number, (is_small, items) in enumerate(grouped(list(value))):
            if number:
                yield b","
            if is_small:
                yield orjson.dumps(items)[1:-1]
            else:
                yield from _parts(items[0])
        yield b"]"
    else:
        yield orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
