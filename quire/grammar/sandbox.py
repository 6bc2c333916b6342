"""Tries grammars out where they can do no harm: each in a process of its own, with a limit to its time and memory.

A grammar is a program of the user's for a compiler that was not written against hostile ones. The `Sandbox` is a
process that has the vocabulary loaded and forks for each grammar, which takes milliseconds; a fork that exceeds its
limits dies alone. Frames on the socket are a length and a msgpack message. The process ends when the socket closes.
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
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.foundation.errors import InputError
from quire.grammar.base import Recipe
from quire.types.structured import GrammarSpec

CPU_SECONDS = 1
NICENESS = 5  # the engine's loop comes first where processors are few
WALL_SECONDS = 6.0  # on a machine that is busy with other things
MEMORY_BYTES = 64 * 1024**2  # more than the vocabulary takes
MAX_FORKS = 4  # at a time
_LENGTH = struct.Struct("<I")
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS")
TOO_COSTLY = "is too complex: compiling it took more than {} of processor time or {} MiB of memory".format(
    f"{CPU_SECONDS} s", MEMORY_BYTES // 1024**2
)


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Which backend compiles, and for which vocabulary: the arguments of `Vocabulary`."""

    backend: str
    folder: str
    size: int
    stop_ids: list[int]


class Try(msgspec.Struct, frozen=True, tag="try"):
    number: int
    spec: GrammarSpec


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    number: int
    recipe: Recipe | None = None  # what the backend builds the grammar from
    error: str | None = None  # why the grammar is refused
    param: str | None = None


class Frames:
    """Messages over a stream socket, read without waiting."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self.socket = sock
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()

    def send(self, message: Any) -> None:
        body = self._encoder.encode(message)
        self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> list[Any]:
        """All messages that have come, once the socket is readable. Raises EOFError when the other side is gone."""
        try:
            chunk = self.socket.recv(1 << 20)
        except OSError:
            chunk = b""
        if not chunk:
            raise EOFError
        self._buffer += chunk
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages


class Sandbox:
    """The parent's side."""

    def __init__(self, opening: Open) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
                    **dict.fromkeys(_THREADS, "1"),  # only a process of one thread forks safely
                },
                process_group=0,
            )
        self.frames = Frames(ours, Verdict)
        self.frames.send(opening)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self.frames.socket.close()
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(slots=True)
class _Fork:
    pid: int
    number: int
    deadline: float
    output: bytearray = field(default_factory=bytearray)


class _Zygote:
    """The child's side: one thread, which never runs a grammar itself."""

    def __init__(self, sock: socket.socket) -> None:
        self._frames = Frames(sock, Open | Try)
        self._backend: Any = None
        self._forks: dict[int, _Fork] = {}  # by the descriptor their verdict comes from
        self._waiting: list[Try] = []

    def run(self) -> None:
        while True:
            try:
                self._turn()
            except EOFError:
                for fork in self._forks.values():
                    os.kill(fork.pid, signal.SIGKILL)
                return

    def _turn(self) -> None:
        sources: list[Any] = [self._frames.socket, *self._forks]
        readable, _, _ = select.select(sources, [], [], 0.5 if self._forks else None)
        now = time.monotonic()
        for fork in self._forks.values():
            if now > fork.deadline:
                os.kill(fork.pid, signal.SIGKILL)
        for source in readable:
            if isinstance(source, int):
                self._read(source)
            else:
                self._waiting += self._frames.receive()
        while self._waiting and len(self._forks) < MAX_FORKS:
            message = self._waiting.pop(0)
            if isinstance(message, Open):
                self._open(message)
            else:
                self._fork(message)

    def _open(self, opening: Open) -> None:
        from pathlib import Path

        from quire.grammar.base import BACKENDS
        from quire.grammar.vocabulary import Vocabulary

        make = BACKENDS.get(opening.backend)
        self._backend = make(Vocabulary(Path(opening.folder), opening.size, opening.stop_ids))

    def _fork(self, trial: Try) -> None:
        source, target = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(source)
            self._try(trial, target)
        os.close(target)
        self._forks[source] = _Fork(pid, trial.number, time.monotonic() + WALL_SECONDS)

    def _try(self, trial: Try, target: int) -> None:
        """In the fork. Never returns."""
        from quire.grammar.rehearsal import rehearse

        try:
            _limit_resources()
            recipe = self._backend.recipe(trial.spec)
            rehearse(self._backend.build(trial.spec, recipe), self._backend.vocabulary.size)
            verdict = Verdict(trial.number, recipe)
        except InputError as error:
            verdict = Verdict(trial.number, error=error.message, param=error.param)
        except MemoryError:
            os._exit(1)
        except RecursionError:
            verdict = Verdict(trial.number, error="is nested too deeply")
        except BaseException as error:
            verdict = Verdict(trial.number, error=f"cannot be compiled: {type(error).__name__}: {str(error)[:200]}")
        with open(target, "wb") as file:
            file.write(msgspec.msgpack.encode(verdict))
        os._exit(0)

    def _read(self, source: int) -> None:
        fork = self._forks[source]
        chunk = os.read(source, 1 << 16)
        fork.output += chunk
        if chunk:
            return
        del self._forks[source]
        os.close(source)
        os.waitpid(fork.pid, 0)
        try:
            verdict = msgspec.msgpack.decode(fork.output, type=Verdict)
        except msgspec.DecodeError:
            verdict = Verdict(fork.number, error=TOO_COSTLY)
        self._frames.send(verdict)


def _limit_resources() -> None:
    """Of a fork, beyond what it was born with."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            born_with = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return  # no Linux: the time is limited all the same
    resource.setrlimit(resource.RLIMIT_AS, (born_with + MEMORY_BYTES, born_with + MEMORY_BYTES))
    os.close(2)  # last words of an allocator


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    _Zygote(socket.socket(fileno=int(sys.argv[1]))).run()
