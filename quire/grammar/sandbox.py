"""Tries grammars out where they can do no harm: each in a fork of its own, with a limit to its time and memory.

A grammar is a program of the user's for a compiler that was not written against hostile ones. The process that forks
(`foundation/fork_server.py`) has the vocabulary loaded, and never compiles a grammar itself.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import msgspec

from quire.foundation.errors import InputError
from quire.foundation.fork_server import ForkClient, ForkServer, Limits
from quire.grammar.base import Backend, Recipe
from quire.grammar.trial import rehearse
from quire.grammar.vocabulary import Vocabulary
from quire.types.structured import GRAMMAR_BACKENDS, GrammarSpec

LIMITS = Limits(
    cpu_seconds=1,
    wall_seconds=6.0,  # on a machine that is busy with other things
    memory_bytes=64 * 1024**2,  # more than the vocabulary takes
    forks=4,
)
NICENESS = 5  # the engine's loop comes first where processors are few
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS")
TOO_COSTLY = (
    f"is too complex: compiling it took more than {LIMITS.cpu_seconds} s of processor time or "
    f"{LIMITS.memory_bytes // 1024**2} MiB of memory"
)


class Open(msgspec.Struct, frozen=True):
    """Which backend compiles, and for which vocabulary: the arguments of `Vocabulary`."""

    backend: str
    folder: str
    size: int
    stop_ids: list[int]


class Verdict(msgspec.Struct, frozen=True):
    recipe: Recipe | None = None  # what the backend builds the grammar from
    error: str | None = None  # why the grammar is refused
    param: str | None = None


class Sandbox:
    """The parent's side. Grammars go in by number, verdicts come out when `socket` is readable."""

    def __init__(self, opening: Open) -> None:
        self._client = ForkClient(
            __name__,
            msgspec.json.encode(opening).decode(),
            **dict.fromkeys(_THREADS, "1"),  # only a process of one thread forks safely
        )
        self.pid = self._client.pid
        self.socket = self._client.socket

    def send(self, number: int, spec: GrammarSpec) -> None:
        """Raises OSError when the process is gone."""
        self._client.send(number, msgspec.msgpack.encode(spec))

    def receive(self) -> list[tuple[int, Verdict]]:
        """Once the socket is readable. Raises EOFError when the process is gone."""
        return [(number, _verdict(answer)) for number, answer in self._client.receive()]

    def close(self) -> None:
        self._client.close()


def _verdict(answer: bytes) -> Verdict:
    return msgspec.msgpack.decode(answer, type=Verdict) if answer else Verdict(error=TOO_COSTLY)


def _try(backend: Backend, spec: GrammarSpec) -> Verdict:
    """In the fork."""
    try:
        recipe = backend.recipe(spec)
        rehearse(backend.build(spec, recipe), backend.vocabulary.size)
        return Verdict(recipe)
    except InputError as error:
        return Verdict(error=error.message, param=error.param)
    except MemoryError:
        raise
    except RecursionError:
        return Verdict(error="is nested too deeply")
    except BaseException as error:
        return Verdict(error=f"cannot be compiled: {type(error).__name__}: {str(error)[:200]}")


def main(descriptor: str, opening: str) -> None:
    os.nice(NICENESS)
    opened = msgspec.json.decode(opening, type=Open)
    backend = GRAMMAR_BACKENDS.get(opened.backend)(Vocabulary(Path(opened.folder), opened.size, opened.stop_ids))

    def work(body: bytes) -> bytes:
        return msgspec.msgpack.encode(_try(backend, msgspec.msgpack.decode(body, type=GrammarSpec)))

    ForkServer(socket.socket(fileno=int(descriptor)), work, LIMITS).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
