"""A load generator for completion servers: streamed requests at given times, from processes of their own.

Every event of a stream is stamped when its bytes are read. Requests are dealt out over a few processes, so that what
is measured is the server and not the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

LEAD_SECONDS = 0.5  # from the start of the processes to the first arrival slot
REQUEST_SECONDS = 240.0  # a request that takes longer has failed


@dataclass(slots=True)
class Planned:
    at: float  # seconds after the first arrival slot
    body: bytes
    num_tokens: int  # that must come


@dataclass(slots=True)
class Seen:
    """What became of one request; times in seconds of CLOCK_MONOTONIC, which processes share."""

    due: float
    sent: float = 0.0
    events: list[float] = field(default_factory=list)  # times of the streamed chunks
    num_tokens: int = 0
    error: str | None = None


def run(url: str, requests: Sequence[Planned], num_processes: int) -> tuple[float, list[Seen]]:
    """Send all `requests` to `url`. Returns the first arrival slot and what was seen, in no order."""
    shards = [shard for i in range(num_processes) if (shard := list(requests[i::num_processes]))]
    start = time.monotonic() + LEAD_SECONDS
    with ProcessPoolExecutor(len(shards), multiprocessing.get_context("fork")) as pool:
        done = [pool.submit(_process, url, shard, start) for shard in shards]
        return start, [seen for each in done for seen in each.result()]


def _process(url: str, requests: list[Planned], start: float) -> list[Seen]:
    gc.disable()
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.run(_drive(url, requests, start))
    return asyncio.run(_drive(url, requests, start))


async def _drive(url: str, requests: list[Planned], start: float) -> list[Seen]:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**18) as session:

        async def send(request: Planned) -> Seen:
            seen = Seen(start + request.at)
            await asyncio.sleep(seen.due - time.monotonic())
            seen.sent = time.monotonic()
            try:
                headers = {"content-type": "application/json"}
                async with session.post(url, data=request.body, headers=headers) as response:
                    if response.status == 200:
                        await _read(response.content, seen)
                    else:
                        seen.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                seen.error = f"{type(error).__name__}: {error}"[:200]
            if seen.error is None and seen.num_tokens != request.num_tokens:
                seen.error = f"{seen.num_tokens} tokens instead of {request.num_tokens}"
            return seen

        return await asyncio.gather(*map(send, requests))


async def _read(stream: asyncio.StreamReader, seen: Seen) -> None:
    """Stamp the events of a stream until its end. The one with the usage tells how many tokens there were."""
    rest = b""
    async for piece in stream.iter_any():  # type: ignore[attr-defined]
        now = time.monotonic()
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                continue
            if event.startswith(b'data: {"error"'):
                seen.error = event[:200].decode("utf-8", "replace")
            elif b'"choices":[]' in event:
                seen.num_tokens = json.loads(event[6:])["usage"]["completion_tokens"]
            elif event.startswith((b"event: response.completed", b"event: response.incomplete")):
                seen.num_tokens = json.loads(event.partition(b"data: ")[2])["response"]["usage"]["output_tokens"]
            elif event.startswith(b"event: message_delta"):
                seen.num_tokens = json.loads(event.partition(b"data: ")[2])["usage"]["output_tokens"]
            else:
                seen.events.append(now)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours; nan if there is none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * share / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
