"""Frames of a stream, byte by byte."""

from __future__ import annotations

import orjson
import pytest

from quire.server.http.sse import TEXT, ChunkWriter


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("text", ["word", 'quote " and \\', "line\nend", "naïve 🦆 \u2028", "\0text\0", ""])
def test_what_stands_around_a_text_gives_the_whole_chunk(text: str, include_usage: bool) -> None:
    shared = {"id": "cmpl-\0text", "model": "m", "created": 1}
    writer = ChunkWriter(shared, include_usage=include_usage)
    before, after = writer.around({"index": 3, "delta": {"content": TEXT}, "finish_reason": None})
    whole = writer.chunk({"index": 3, "delta": {"content": text}, "finish_reason": None})
    assert before + orjson.dumps(text) + after == whole
    event = orjson.loads(whole.removeprefix(b"data: "))
    assert event["choices"][0]["delta"]["content"] == text
