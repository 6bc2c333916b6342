"""What is long is kept in another process from its first bytes on, and asked about there.

`BodyServer` is a server of forks (`fork_server.py`) whose bodies come in parts and stay until they are taken back. Each
question about one is answered by a fork, in pieces (`value_pieces.py`) as they are made. So nobody on this side ever
holds such a body, or is busy with more than a part of one.

Frames on the socket: the first byte says what the rest is, a part or a question, perhaps one that takes long; an empty
one takes the body back. Answers are a part of the stream of pieces, each with its length in front, or its end, as it
should be or not.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from quire.foundation.async_forks import ForkProcess
from quire.foundation.fork_server import HEAD, Fork, Forks, Limits, frame
from quire.foundation.value_pieces import Pieces

_PART, _QUESTION, _LONG_QUESTION = b"+", b"?", b"*"
_MORE, _END, _FAILED = b"+", b".", b"!"
_LENGTH = struct.Struct("<I")
Answer = Callable[[bytes, bytearray], Iterator[bytes]]


class KeptElsewhere(ForkProcess):
    """The side of an event loop. greeting: what the process gets first."""

    def __init__(self, module: str, *arguments: str, greeting: Callable[[], bytes] = bytes, **environment: str) -> None:
        super().__init__(module, *arguments, **environment)
        self._make_greeting = greeting
        self._bodies: dict[int, KeptBody] = {}

    @property
    def num_bodies(self) -> int:
        return len(self._bodies)

    async def open(self) -> KeptBody:
        """A body without parts yet."""
        writer = await self._connected()
        body = KeptBody(self, next(self._numbers), writer)
        self._bodies[body.number] = body
        return body

    def close(self, body: KeptBody) -> None:
        if self._bodies.pop(body.number, None) is not None:
            self._take_back(body.number)

    def _greeting(self) -> bytes:
        return self._make_greeting()

    def _received(self, number: int, body: bytes) -> None:
        if number in self._bodies:
            self._bodies[number].received(body)

    def _lost(self) -> None:
        for body in self._bodies.values():
            body.lost()
        self._bodies.clear()


class KeptBody:
    """One body. `close` it in any case. All else raises ConnectionError if the process has ended."""

    def __init__(self, keeper: KeptElsewhere, number: int, writer: asyncio.StreamWriter) -> None:
        self._keeper, self.number, self._writer = keeper, number, writer
        self._stream = bytearray()
        self._pieces = Pieces()
        self._answer: asyncio.Future[Any] | None = None
        self.size = 0
        self.is_lost = False

    async def add(self, part: bytes) -> None:
        """Waits while the process is busy with what it has."""
        self._check()
        self.size += len(part)
        self._writer.write(frame(self.number, _PART + part))
        await self._writer.drain()

    async def ask(self, question: bytes, pieces: Pieces, *, takes_long: bool = False) -> Any:
        """The answer, put together by `pieces`. takes_long: it may wait for others of the kind, but not they for it.

        Raises EOFError if the fork exceeded its limits.
        """
        self._check()
        self._pieces, self._answer = pieces, asyncio.get_running_loop().create_future()
        self._stream.clear()
        self._writer.write(frame(self.number, (_LONG_QUESTION if takes_long else _QUESTION) + question))
        await self._writer.drain()
        return await self._answer

    def close(self) -> None:
        """It is kept no longer; a fork that works on it is ended."""
        self._keeper.close(self)

    def received(self, body: bytes) -> None:
        answer = self._answer
        if answer is None or answer.done():
            return
        if body[:1] == _MORE:
            self._stream += memoryview(body)[1:]
            try:
                self._take_pieces()
            except Exception as error:
                answer.set_exception(error)
        elif body[:1] == _END and self._pieces.is_whole:
            answer.set_result(self._pieces.value)
        else:
            answer.set_exception(EOFError())

    def _take_pieces(self) -> None:
        start = 0
        while len(self._stream) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._stream, start)
            end = start + _LENGTH.size + length
            if end > len(self._stream):
                break
            self._pieces.add(bytes(self._stream[start + _LENGTH.size : end]))
            start = end
        del self._stream[:start]

    def lost(self) -> None:
        self.is_lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError())

    def _check(self) -> None:
        if self.is_lost:
            raise ConnectionResetError


def read_greeting(sock: socket.socket) -> bytes:
    """What the parent sends first. Raises EOFError if it is gone."""
    length, _ = HEAD.unpack(_receive(sock, HEAD.size))
    return _receive(sock, length)


def _receive(sock: socket.socket, size: int) -> bytes:
    """No more than that: what follows is for others."""
    found = sock.recv(size, socket.MSG_WAITALL)
    if len(found) < size:
        raise EOFError
    return found


class BodyServer(Forks):
    """The child's side.

    answer: from a question and a body to pieces, in a fork. at_length: forks at a time for questions that take long.
    """

    def __init__(self, sock: socket.socket, answer: Answer, limits: Limits, at_length: int | None = None) -> None:
        super().__init__(sock, limits)
        self._at_length = limits.forks if at_length is None else at_length
        self._answer = answer
        self._kept: dict[int, bytearray] = {}

    def _take(self, number: int, body: bytes) -> None:
        if body[:1] == _PART:
            self._kept.setdefault(number, bytearray()).extend(memoryview(body)[1:])
        elif body:
            self._waiting.append((number, body))
        else:
            self._kept.pop(number, None)
            self._forget(number)

    def _next(self) -> tuple[int, bytes] | None:
        long = sum(fork.takes_long for fork in self._forks.values())
        for position, (_, body) in enumerate(self._waiting):
            if body[:1] == _QUESTION or long < self._at_length:
                found = self._waiting[position]
                del self._waiting[position]
                return found
        return None

    def _takes_long(self, body: bytes) -> bool:
        return body[:1] == _LONG_QUESTION

    def _write_answer(self, number: int, body: bytes, file: BinaryIO) -> None:
        for piece in self._answer(body[1:], self._kept.get(number, bytearray())):
            file.write(_LENGTH.pack(len(piece)) + piece)

    def _written(self, fork: Fork, chunk: bytes) -> None:
        self._socket.sendall(frame(fork.number, _MORE + chunk))

    def _ended(self, fork: Fork, *, is_well: bool) -> None:
        self._socket.sendall(frame(fork.number, _END if is_well else _FAILED))
