"""Vectors as clients want them: numbers in JSON, base64, or bytes alone."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import orjson
from starlette.types import Send

from quire.server.limits import InFlight
from quire.server.pooling_protocol import EmbedDtype, Endianness
from quire.server.sse import LiveReply


def to_bytes(data: np.ndarray, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """data: float32 of any shape."""
    if dtype == "bfloat16":
        bits = data.astype(np.float32).view(np.uint32)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # to the nearest, ties to even
        values = np.where(np.isnan(data), bits, rounded) >> 16
        found = values.astype(np.uint16)
    else:
        found = data.astype(dtype)
    return found.astype(found.dtype.newbyteorder(endianness)).tobytes()


def to_base64(data: np.ndarray, dtype: EmbedDtype = "float32", endianness: Endianness = "native") -> str:
    return base64.b64encode(to_bytes(data, dtype, endianness)).decode("ascii")


class BytesReply(LiveReply):
    """All vectors one behind the other. metadata: put as JSON into a header of that name."""

    def __init__(
        self,
        in_flight: InFlight,
        answers: int,
        make: Callable[[], Awaitable[tuple[bytes, dict[str, Any] | None]]],
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        super().__init__(in_flight, answers, headers)
        self.make = make

    async def produce(self, send: Send) -> None:
        body, metadata = await self.make()
        self.started = True
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(len(body)).encode()),
            *self.extra_headers,
        ]
        if metadata is not None:
            headers.append((b"metadata", orjson.dumps(metadata)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
