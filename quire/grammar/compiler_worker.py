"""One backend at work: a thread that builds its tables and compiles here what its sandbox has seen to be harmless.

The library compiles with the GIL released. Each backend has a thread and a sandbox of its own, so that none waits for
another to be loaded, which takes seconds for one that imports much.
"""

from __future__ import annotations

import importlib.util
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.foundation.errors import ConfigError, InputError, QuireError
from quire.foundation.log import get_logger
from quire.grammar.base import Backend, CompiledGrammar
from quire.grammar.sandbox import Open, Sandbox, Verdict
from quire.grammar.vocabulary import Vocabulary
from quire.types.structured import BACKEND_PACKAGES, FIELD, GRAMMAR_BACKENDS, GrammarSpec

MAX_TRIES = 2  # of one grammar, if the sandbox ends under it
_log = get_logger(__name__)


@dataclass(slots=True)
class Job:
    """A grammar in the making, and who waits for it."""

    number: int
    spec: GrammarSpec
    tickets: list[int]
    num_tries: int = 0


class CompilerWorker:
    """Used by one thread, beside its own.

    vocabulary: makes it, or has it; raises ConfigError, and then every grammar is refused.
    finish: is told how a job ended, on this worker's thread: a grammar, or what is wrong with it.
    """

    def __init__(
        self,
        opening: Open,
        vocabulary: Callable[[], Vocabulary],
        finish: Callable[[Job, CompiledGrammar | InputError], None],
    ) -> None:
        self._name = opening.backend
        self._opening = opening
        self._make_vocabulary = vocabulary
        self._finish = finish
        self._backend: Backend | None = None
        self._sandbox: Sandbox | None = None
        self._asked: deque[Job] = deque()
        self._is_closed = False
        self._wake, self._new_job = pipe()
        self._thread = threading.Thread(target=self._run, name=f"grammars by {self._name}", daemon=True)
        self._thread.start()

    @property
    def backend(self) -> Backend:
        """Once it has made a grammar."""
        assert self._backend is not None, "a matcher without a grammar"
        return self._backend

    def ask(self, job: Job) -> None:
        """`finish` will be told. Never waits."""
        self._asked.append(job)
        os.write(self._new_job, b"x")

    def close(self) -> None:
        """End the process that compiles. Once."""
        self._is_closed = True
        os.write(self._new_job, b"x")
        self._thread.join()
        for fd in (self._wake, self._new_job):
            os.close(fd)

    # The thread

    def _run(self) -> None:
        problem = ""
        try:
            self._build()
        except QuireError as error:
            problem = str(error)
        except Exception as error:
            _log.exception("structured outputs by %s are not available", self._name)
            problem = f"structured outputs by {self._name} are not available: {error}"
        running: dict[int, Job] = {}
        is_broken = False
        while not self._is_closed:
            try:
                if is_broken:
                    self._restart(running)
                    is_broken = False
                self._take_asked(running, problem)
                is_broken = not self._take_verdicts(running)
            except OSError as error:
                _log.error("the grammar sandbox cannot be used: %s", error)
                is_broken = True
        self._close_sandbox()

    def _build(self) -> None:
        """Raises ConfigError if this engine cannot bind answers."""
        package = BACKEND_PACKAGES.get(self._name)
        if package is not None and importlib.util.find_spec(self._name) is None:
            raise ConfigError(f"structured outputs by {self._name} need `pip install '{package}'` on the server")
        vocabulary = self._make_vocabulary()
        self._open_sandbox()  # which makes its tables meanwhile
        self._backend = GRAMMAR_BACKENDS.get(self._name)(vocabulary)

    def _open_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = Sandbox(self._opening)
        return self._sandbox

    def _close_sandbox(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def _take_asked(self, running: dict[int, Job], problem: str) -> None:
        asked = [self._asked.popleft() for _ in range(len(self._asked))]
        if problem:
            for job in asked:
                self._finish(job, InputError(problem, FIELD))
            return
        running.update((job.number, job) for job in asked)  # all, before the first can fail
        for job in asked:
            self._try(job)

    def _take_verdicts(self, running: dict[int, Job]) -> bool:
        """Wait for verdicts or for something to be asked; False if the sandbox has ended."""
        sources: list[Any] = [self._wake]
        if self._sandbox is not None:
            sources.append(self._sandbox.socket)
        readable, _, _ = select.select(sources, [], [])
        if self._wake in readable:
            os.read(self._wake, 1 << 16)
        if self._sandbox is not None and self._sandbox.socket in readable:
            try:
                verdicts = self._sandbox.receive()
            except EOFError:
                _log.warning("the grammar sandbox ended; it is started again")
                return False
            for number, verdict in verdicts:
                job = running.pop(number)
                self._finish(job, self._made(job.spec, verdict))
        return True

    def _try(self, job: Job) -> None:
        job.num_tries += 1
        self._open_sandbox().send(job.number, job.spec)

    def _restart(self, running: dict[int, Job]) -> None:
        self._close_sandbox()
        for job in list(running.values()):
            if job.num_tries < MAX_TRIES:
                self._try(job)
            else:
                del running[job.number]
                self._finish(job, InputError(f"the {job.spec.kind} cannot be compiled", FIELD))

    def _made(self, spec: GrammarSpec, verdict: Verdict) -> CompiledGrammar | InputError:
        if verdict.recipe is None:
            about = "" if verdict.param else f"the {spec.kind} "
            return InputError(f"{about}{verdict.error}", verdict.param or FIELD)
        try:
            return self.backend.build(spec, verdict.recipe)
        except InputError as error:
            return error
        except Exception as error:  # one grammar's trouble must not end the thread that others wait for
            _log.exception("a grammar that passed the sandbox does not compile")
            return InputError(f"the {spec.kind} cannot be compiled: {error}", FIELD)


def pipe() -> tuple[int, int]:
    """A pipe that nobody waits at: its bytes only wake."""
    source, target = os.pipe()
    os.set_blocking(source, False)
    os.set_blocking(target, False)
    return source, target
