"""Large values arrive as they were, in pieces none of which is large."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.foundation.value_pieces import MANY, PIECE, Pieces, pieces_of


@dataclass
class Thing:
    name: str
    inner: Any


def taken_apart(value: Any) -> tuple[str, Any]:
    if isinstance(value, Thing):
        return "thing", [value.name, value.inner]
    raise TypeError(str(type(value)))


def returned(value: Any) -> tuple[Any, list[bytes]]:
    pieces, found = list(pieces_of(value, taken_apart)), Pieces({"thing": lambda parts: Thing(*parts)})
    for piece in pieces:
        assert not found.is_whole
        found.add(piece)
    assert found.is_whole
    return found.value, pieces


def drawn(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(9 if depth else 6)
    count = draw.choice([0, 1, 3, MANY, MANY + 1, 3000])
    if kind < 4:
        return draw.choice([None, True, -(2**63), 2**64 - 1, 1.5, "", "é" * count, "𒀀" * 9000, "x" * count])
    if kind == 4:
        return draw.choices([1, None, "abc", 0.5], k=count)
    if kind == 5:
        return {f"k{i}": i for i in range(count)}
    if kind == 6:
        return [drawn(draw, depth - 1) for _ in range(count % 7)]
    if kind == 7:
        return {f"\0{i}": drawn(draw, depth - 1) for i in range(count % 7)}
    return Thing("t", drawn(draw, depth - 1))


def num_values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(num_values, value.values()))
    return 1 + sum(map(num_values, value)) if isinstance(value, list) else 1


def test_values_come_back_and_no_piece_is_large() -> None:
    draw = random.Random(3)
    for _ in range(300):
        value = drawn(draw, 3)
        found, pieces = returned(value)
        assert found == value
        for piece in pieces:
            assert len(piece) <= 2 * PIECE + 1024
            if piece[:1] in b"vie":
                assert num_values(msgspec.msgpack.decode(piece[1:])) <= 2 * MANY


def test_what_cannot_be_sent_is_refused() -> None:
    for value in (2**70, [b"x"], {"a": {1}}):
        with pytest.raises(TypeError):
            returned(value)


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.uint8])
@pytest.mark.parametrize("shape", [(0,), (5,), (100_000,), (70, 1001)])
def test_arrays(dtype: type, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    [found, other], pieces = returned([array, "x"])
    assert found.dtype == dtype
    assert np.array_equal(found, array)
    assert other == "x"
    assert max(map(len, pieces)) <= PIECE + 1


def test_pieces_of_nothing_are_refused() -> None:
    for piece in (b"t1", b"i\x90", b"kx", b"?"):
        with pytest.raises(ValueError, match="piece"):
            Pieces().add(piece)
