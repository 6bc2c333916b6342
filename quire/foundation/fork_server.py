"""Work on a stranger's input, each piece in a process of its own, with a limit to its time and memory.

The server is a small process that has imported what the work needs, and forks for each piece, which takes a
millisecond or two; a fork that exceeds its limits dies alone. It knows nothing of its parent's environment, and ends
when the socket closes. Frames on the socket: length of the body, number of the piece, body. The answer to a piece has
its number; an empty body means that the fork died. An empty body from the parent takes the piece back.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

HEAD = struct.Struct("<IQ")
_CHUNK = 1 << 20
_ANSWER = 64 * 1024  # bytes of an answer at a time; a pipe holds no more
PATIENCE = 10
_KEPT_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ")


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one fork, and how many there are at a time."""

    cpu_seconds: int
    wall_seconds: float  # without those in which it waited for a processor, which are PATIENCE times as many at most
    memory_bytes: int  # beyond what the fork was born with
    forks: int
    file_bytes: int = 0  # that it may write to one file
    niceness: int = 10  # streams of others go first


def spawn(module: str, *arguments: str, **environment: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `module` as a server. Its first argument is the number of the socket's descriptor."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
            | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
            | environment,
            process_group=0,  # Ctrl-C is for the parent alone
        )
    return process, ours


def frame(number: int, body: bytes) -> bytes:
    return HEAD.pack(len(body), number) + body


def take_frames(buffer: bytearray) -> list[tuple[int, bytes]]:
    """Number and body of the frames that are there whole; the rest stays in the buffer."""
    found = []
    while len(buffer) >= HEAD.size:
        length, number = HEAD.unpack_from(buffer)
        end = HEAD.size + length
        if len(buffer) < end:
            break
        found.append((number, bytes(buffer[HEAD.size : end])))
        del buffer[:end]
    return found


class ForkClient:
    """The parent's side, for a thread that waits at `socket` until there is something to receive."""

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        self._process, self.socket = spawn(module, *arguments, **environment)
        self._buffer = bytearray()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: int, body: bytes) -> None:
        """Raises OSError when the server is gone."""
        self.socket.sendall(frame(number, body))

    def receive(self) -> list[tuple[int, bytes]]:
        """The answers that have come, once the socket is readable. Raises EOFError when the server is gone."""
        try:
            chunk = self.socket.recv(_CHUNK)
        except OSError:
            chunk = b""
        if not chunk:
            raise EOFError
        self._buffer += chunk
        return take_frames(self._buffer)

    def close(self) -> None:
        self.socket.close()
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(slots=True)
class Fork:
    pid: int
    number: int
    deadline: float
    takes_long: bool = False
    output: bytearray = field(default_factory=bytearray)


class Forks(ABC):
    """The child's side: one thread, which never does the work itself."""

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._socket = sock
        self._limits = limits
        self._buffer = bytearray()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._forks: dict[int, Fork] = {}  # by the descriptor their answer comes from
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def run(self) -> None:
        """Until the parent is gone."""
        try:
            while True:
                self._turn()
        except (EOFError, OSError):
            for fork in self._forks.values():
                os.kill(fork.pid, signal.SIGKILL)

    def _turn(self) -> None:
        sources: list[Any] = [self._socket, *self._forks]
        readable, _, _ = select.select(sources, [], [], 0.1 if self._forks else None)
        now = time.monotonic()
        for fork in self._forks.values():
            late = now - fork.deadline
            if late > 0 and late > min(_waited(fork.pid), PATIENCE * self._limits.wall_seconds):
                os.kill(fork.pid, signal.SIGKILL)
        for source in readable:
            if isinstance(source, int):
                self._read_fork(source)
            else:
                self._read_parent()
        while len(self._forks) < self._limits.forks and (piece := self._next()) is not None:
            self._fork(*piece)

    def _next(self) -> tuple[int, bytes] | None:
        """The piece that has its turn."""
        return self._waiting.popleft() if self._waiting else None

    def _takes_long(self, body: bytes) -> bool:
        """Of a piece."""
        del body
        return False

    def _read_parent(self) -> None:
        chunk = self._socket.recv(_CHUNK)
        if not chunk:
            raise EOFError
        self._buffer += chunk
        for number, body in take_frames(self._buffer):
            self._take(number, body)

    def _take(self, number: int, body: bytes) -> None:
        if body:
            self._waiting.append((number, body))
        else:
            self._forget(number)

    def _forget(self, number: int) -> None:
        """Nobody waits for this piece any more."""
        self._waiting = deque(piece for piece in self._waiting if piece[0] != number)
        for fork in self._forks.values():
            if fork.number == number:
                os.kill(fork.pid, signal.SIGKILL)

    def _fork(self, number: int, body: bytes) -> None:
        source, target = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._do(number, body, target)
        os.close(target)
        deadline = time.monotonic() + self._limits.wall_seconds
        self._forks[source] = Fork(pid, number, deadline, takes_long=self._takes_long(body))

    def _do(self, number: int, body: bytes, target: int) -> None:
        """In the fork. Never returns."""
        try:
            self._socket.close()
            for source in self._forks:
                os.close(source)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the last words of an allocator
            _limit(self._limits)
            with open(target, "wb") as file:
                self._write_answer(number, body, file)
            os._exit(0)
        finally:
            os._exit(1)

    @abstractmethod
    def _write_answer(self, number: int, body: bytes, file: BinaryIO) -> None:
        """In the fork."""

    def _read_fork(self, source: int) -> None:
        fork = self._forks[source]
        chunk = os.read(source, _ANSWER)
        if chunk:
            self._written(fork, chunk)
            return
        del self._forks[source]
        os.close(source)
        _, status = os.waitpid(fork.pid, 0)
        self._ended(fork, is_well=not status)

    @abstractmethod
    def _written(self, fork: Fork, chunk: bytes) -> None:
        """A part of a fork's answer."""

    @abstractmethod
    def _ended(self, fork: Fork, *, is_well: bool) -> None:
        """A fork is done, or exceeded its limits."""


class ForkServer(Forks):
    """work: from a piece to its answer, which is sent whole."""

    def __init__(self, sock: socket.socket, work: Callable[[bytes], bytes], limits: Limits) -> None:
        super().__init__(sock, limits)
        self._work = work

    def _write_answer(self, number: int, body: bytes, file: BinaryIO) -> None:
        del number
        file.write(self._work(body))

    def _written(self, fork: Fork, chunk: bytes) -> None:
        fork.output += chunk

    def _ended(self, fork: Fork, *, is_well: bool) -> None:
        self._socket.sendall(frame(fork.number, bytes(fork.output) if is_well else b""))


def _waited(pid: int) -> float:
    """Seconds in which others had the processors that a process wanted; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _limit(limits: Limits) -> None:
    """Of a fork, beyond what it was born with."""
    os.nice(limits.niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            born_with = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # no Linux: the time is limited all the same
    resource.setrlimit(resource.RLIMIT_AS, (born_with + limits.memory_bytes,) * 2)
