"""Messages between processes: typed msgpack, and large numpy arrays beside it, uncopied. No pickle.

A message is a list of frames. Frame 0 is msgpack; an array in it is an extension that holds its header and either
its bytes (small ones) or the number of the frame that does. Sockets are Unix-domain sockets in a private folder.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import zmq

from quire.foundation.errors import QuireError

T = TypeVar("T")
Frame = bytes | bytearray | memoryview

ARRAY_CODE = 1  # msgpack extension type
INLINE_BYTES = 64 * 1024  # arrays below travel inside frame 0: one copy is cheaper than one more frame
MAX_DIMS = 8
_HEADER = struct.Struct("<BBI")  # index in _DTYPES, dimensions, frame (0: the bytes follow the shape)
_DTYPES = tuple(np.dtype(code) for code in "?bhilBHILefd")  # bool, int8 … int64, uint8 … uint64, float16 … float64
_DTYPE_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}


class WireError(QuireError, ValueError):
    """A message cannot be written or read: wrong types, or bytes that are no message. `body`: frame 0 as it came."""

    def __init__(self, message: str, body: bytes = b"") -> None:
        super().__init__(message)
        self.body = body


class Encoder:
    """Writes messages. One a thread."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._extension)
        self._frames: list[Frame] = []

    def encode(self, message: Any) -> list[Frame]:
        """The frames of `message`. Frames after the first are views: the arrays must not change until they are sent."""
        frames: list[Frame] = [b""]
        self._frames = frames
        try:
            frames[0] = self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WireError(f"cannot send {type(message).__name__}: {error}") from None
        return frames

    def _extension(self, value: Any) -> msgspec.msgpack.Ext:
        if isinstance(value, np.generic):
            value = np.asarray(value)
        if not isinstance(value, np.ndarray):
            raise TypeError(f"objects of type {type(value).__name__} cannot be sent")
        index = _DTYPE_INDEX.get(value.dtype)
        if index is None or value.ndim > MAX_DIMS:
            raise TypeError(f"arrays of dtype {value.dtype} and {value.ndim} dimensions cannot be sent")
        value = np.ascontiguousarray(value).reshape(value.shape)
        shape = struct.pack(f"<{value.ndim}Q", *value.shape)
        if value.nbytes < INLINE_BYTES:
            return msgspec.msgpack.Ext(ARRAY_CODE, _HEADER.pack(index, value.ndim, 0) + shape + value.tobytes())
        self._frames.append(memoryview(value.reshape(-1).view(np.uint8)))
        return msgspec.msgpack.Ext(ARRAY_CODE, _HEADER.pack(index, value.ndim, len(self._frames) - 1) + shape)


class Decoder(Generic[T]):
    """Reads messages of one type (a struct or a union of tagged structs). One a thread."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind, ext_hook=self._array)
        self._frames: Sequence[Frame] = ()

    def decode(self, frames: Sequence[Frame]) -> T:
        """Raises WireError for anything that is not a message of this type."""
        if not frames:
            raise WireError("a message without frames")
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise WireError(f"not a valid message: {error}", bytes(frames[0])) from None
        finally:
            self._frames = ()

    def _array(self, code: int, data: memoryview) -> np.ndarray:
        if code != ARRAY_CODE or len(data) < _HEADER.size:
            raise WireError(f"unknown extension {code} of {len(data)} bytes")
        index, dims, frame = _HEADER.unpack_from(data)
        body = _HEADER.size + 8 * dims
        if index >= len(_DTYPES) or dims > MAX_DIMS or len(data) < body or frame >= len(self._frames):
            raise WireError("array header is not valid")
        shape = struct.unpack_from(f"<{dims}Q", data, _HEADER.size)
        content = memoryview(self._frames[frame]).cast("B") if frame else data[body:]
        dtype = _DTYPES[index]
        if math.prod(shape) * dtype.itemsize != content.nbytes or (frame and len(data) != body):
            raise WireError(f"array of shape {shape} and dtype {dtype} cannot have {content.nbytes} bytes")
        array = np.frombuffer(content, dtype=dtype).reshape(shape)
        return array if frame else array.copy()  # the copy is aligned and lets go of the message


class Channel(Generic[T]):
    """Two one-way ZMQ sockets between two processes: any thread may send, one thread reads.

    Readers bind and writers connect, so that a writer queues at once, whether or not the other side is there (yet).
    Nothing is ever dropped.
    """

    def __init__(self, folder: Path, incoming: Any, *, parent: bool) -> None:
        self._context = zmq.Context()
        self._encoder, self._decoder = Encoder(), Decoder[T](incoming)
        self._send_lock = threading.Lock()
        self._out = self._context.socket(zmq.PUSH)
        self._in = self._context.socket(zmq.PULL)
        for socket in (self._out, self._in):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms until a parent finds its child
        down, up = f"ipc://{folder}/down", f"ipc://{folder}/up"
        self._in.bind(up if parent else down)
        self._out.connect(down if parent else up)

    def send(self, message: Any) -> None:
        """Queue a message; never waits for the other side. Raises WireError if it cannot be written."""
        with self._send_lock:
            self._send(self._encoder.encode(message))

    @staticmethod
    def send_all(channels: Sequence[Channel[Any]], message: Any) -> None:
        """`send` to several what is written once."""
        with channels[0]._send_lock:
            frames = channels[0]._encoder.encode(message)
        for channel in channels:
            with channel._send_lock:
                channel._send(frames)

    def _send(self, frames: list[Frame]) -> None:
        if len(frames) == 1:
            self._out.send(frames[0])
        else:
            self._out.send_multipart(frames, copy=False)

    def receive(self) -> T | None:
        """The next message if it has arrived. Raises WireError if it cannot be read."""
        try:
            frames = self._in.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return self._decoder.decode([frame.buffer for frame in frames])

    def wait(self, timeout: float | None, *others: int) -> bool:
        """Sleep until a message is there, one of the `others` (file descriptors) is readable or `timeout` seconds
        have passed. Returns whether a message is there."""
        return self._in in _poll([self._in], timeout, others)

    @staticmethod
    def wait_any(channels: Iterable[Channel[Any]], timeout: float | None, *others: int) -> None:
        """`wait` for the messages of several channels."""
        _poll([channel._in for channel in channels], timeout, others)

    def fileno(self) -> int:
        """Readable when messages may have come. Edge-triggered: call `receive` until None before waiting on it."""
        return int(self._in.getsockopt(zmq.FD))

    def close(self, linger: float = 0) -> None:
        """Close both sockets; waits up to `linger` seconds for messages that are still on their way out."""
        self._out.close(linger=int(linger * 1000))
        self._in.close(linger=0)
        self._context.term()


def _poll(sockets: Sequence[zmq.Socket[bytes]], timeout: float | None, fds: Sequence[int]) -> dict[Any, int]:
    poller = zmq.Poller()
    for one in (*sockets, *fds):
        poller.register(one, zmq.POLLIN)
    return dict(poller.poll(None if timeout is None else max(0, math.ceil(timeout * 1000))))
