"""JSON in parts is the same JSON, and others get turns while it is written."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import orjson
import pytest

from quire.foundation.json_parts import json_parts
from quire.foundation.value_pieces import MANY


def drawn(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(7 if depth else 4)
    count = draw.choice([0, 1, 5, MANY, MANY + 1, 3000])
    if kind == 0:
        return draw.choice([None, True, 5, -1.5, float("-inf"), 'é"\\\n' * count, "𒀀" * count])
    if kind == 1:
        return np.arange(count, dtype=draw.choice([np.int32, np.float32]))
    if kind == 2:
        return [0.5] * count
    if kind == 3:
        return np.ones((count % 7, 70), np.float32)
    if kind == 4:
        return [drawn(draw, depth - 1) for _ in range(count % 7)]
    return {f'k"{i}': drawn(draw, depth - 1) for i in range(count % 7)}


def test_parts_are_the_whole() -> None:
    draw = random.Random(4)
    for _ in range(200):
        value = drawn(draw, 3)
        parts = asyncio.run(json_parts(value))
        assert b"".join(parts) == orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        assert max(map(len, parts)) < 128 * 1024


def test_what_is_long_is_written_in_turns() -> None:
    value = {"data": [{"index": i, "embedding": np.ones(1024, np.float32)} for i in range(500)]}

    async def work() -> int:
        writing, turns = asyncio.create_task(json_parts(value)), 0
        while not writing.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(work()) > 30


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(TypeError):
        asyncio.run(json_parts([{1}]))
