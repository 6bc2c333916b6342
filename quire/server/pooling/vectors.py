"""Vectors as clients want them: numbers in JSON, base64, or bytes alone."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import orjson
from starlette.types import Send

from quire.server.http.limits import OpenAnswers
from quire.server.http.sse import LiveReply
from quire.server.pooling.protocol import EmbedDtype, Endianness

# Bits of the mantissa, bias of the exponent, the largest code (where what is too large ends), the code of NaN
_FP8 = {"fp8_e4m3": (3, 7, 0x7E, 0x7F), "fp8_e5m2": (2, 15, 0x7C, 0x7E)}


def to_bytes(data: np.ndarray, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """data: float32 of any shape."""
    if dtype == "bfloat16":
        bits = data.astype(np.float32).view(np.uint32)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # to the nearest, ties to even
        values = np.where(np.isnan(data), bits | 0x400000, rounded) >> 16  # NaN stays NaN
        found = values.astype(np.uint16)
    elif dtype in _FP8:
        found = _to_fp8(data, *_FP8[dtype])
    else:
        found = data.astype(dtype)
    return found.astype(found.dtype.newbyteorder(endianness)).tobytes()


def _to_fp8(data: np.ndarray, bits: int, bias: int, last: int, nan: int) -> np.ndarray:
    """8-bit floats as bytes: to the nearest, ties to even; too large ones are the largest (e4m3) or infinity."""
    codes = np.arange(last + 1)
    exponent, mantissa = codes >> bits, (codes & ((1 << bits) - 1)) / (1 << bits)
    values = np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), np.ldexp(1 + mantissa, exponent - bias))
    middles = (values[1:] + values[:-1]) / 2
    size = np.abs(data, dtype=np.float32)
    found = np.searchsorted(middles, size)  # at a tie: the smaller of the two
    is_tie = np.append(middles, np.inf)[found] == size
    found = np.where(is_tie & (found < last), found + (found & 1), found)
    found = np.where(np.isnan(size), nan, found)
    signed: np.ndarray = found | (np.signbit(data).astype(np.int64) << 7)
    return signed.astype(np.uint8)


def to_base64(data: np.ndarray, dtype: EmbedDtype = "float32", endianness: Endianness = "native") -> str:
    return base64.b64encode(to_bytes(data, dtype, endianness)).decode("ascii")


class BytesReply(LiveReply):
    """All vectors one behind the other. metadata: put as JSON into a header of that name."""

    def __init__(
        self,
        in_flight: OpenAnswers,
        answers: int,
        make: Callable[[], Awaitable[tuple[bytes, dict[str, Any] | None]]],
    ) -> None:
        super().__init__(in_flight, answers)
        self.make = make

    async def produce(self, send: Send) -> None:
        body, metadata = await self.make()
        self.started = True
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(len(body)).encode()),
        ]
        if metadata is not None:
            headers.append((b"metadata", orjson.dumps(metadata)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
