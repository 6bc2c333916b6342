"""The parts of the serving benchmark that need no server of ours: load generator, counting, made-up tokenizer."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import peers, serve, serve_load, workloads

GAP = 0.05  # seconds between two chunks of the server below


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One streamed completion of `max_tokens` chunks; a request for 13 is refused, one for 7 comes up short."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    count = json.loads(await reader.readexactly(length))["max_tokens"]
    if count == 13:
        writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbusy")
    else:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for i in range(count):
            text = "choices" if i else '"choices":[] \\n\\n data: [DONE]'
            writer.write(f'data: {{"choices":[{{"text":{json.dumps(text)}}}]}}\n\n'.encode())
            await writer.drain()
            await asyncio.sleep(GAP)
        told = count - (count == 7)
        writer.write(b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % told)
    writer.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(_answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.close()


def ask(at: float, count: int) -> serve_load.Planned:
    return serve_load.Planned(at, json.dumps({"max_tokens": count}).encode(), count)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside the server's thread, which no child touches
def test_every_chunk_is_stamped_and_every_failure_is_counted(url: str) -> None:
    start, seen = serve_load.run(url, [ask(0.0, 4), ask(0.3, 2), ask(0.0, 13), ask(0.0, 7)], 2)
    by_length = {len(s.events): s for s in seen if s.error is None}
    assert sorted(by_length) == [2, 4]
    four = by_length[4]
    assert four.num_tokens == 4
    assert all(b - a > GAP / 2 for a, b in zip(four.events, four.events[1:], strict=False))
    assert four.sent <= four.events[0]
    assert by_length[2].due == start + 0.3
    assert by_length[2].sent >= start + 0.3 - 0.002  # timers may ring a little early
    errors = sorted(s.error for s in seen if s.error is not None)
    assert errors == ["6 tokens instead of 7", "HTTP 503: busy"]


def test_percentiles_lie_between_neighbours() -> None:
    assert serve_load.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert serve_load.percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert math.isnan(serve_load.percentile([], 50))


def test_every_id_of_the_made_up_tokenizer_has_a_text(tmp_path: Path) -> None:
    folder = workloads.write_model_dir("tiny-qwen3", tmp_path / "m", tokenizer=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = workloads.MODELS["tiny-qwen3"]["vocab_size"]
    assert tokenizer.get_vocab_size() == size
    assert all(tokenizer.id_to_token(i) for i in range(0, size, 997))
    assert tokenizer.decode([256, size - 1]).startswith(" aaaa ")
    assert tokenizer.encode("some text").ids == list(map(tokenizer.token_to_id, "someĠtext"))


def test_a_peer_is_best_where_more_or_less_is_better() -> None:
    assert peers.best("T5", "llama-3.1-8b", "rate=32", "ttft_p50_ms") == 52
    assert peers.is_rate("done_req_s")
    assert not peers.is_rate("gap_p99_ms")


def test_stalls_are_long_gaps_that_end_together() -> None:
    streams = [[1.0, 1.01, 1.25], [1.0, 1.02, 1.26], [1.2, 1.21, 2.0], [1.9, 1.95]]
    seen = [serve_load.Seen(due=0.0, events=events) for events in streams]
    first, second = serve.stalls(1.0, seen)
    assert (first.streams, round(first.at, 2), round(first.gap, 2)) == (2, 0.25, 0.24)
    assert (second.streams, round(second.at, 2), round(second.gap, 2)) == (1, 1.0, 0.79)
