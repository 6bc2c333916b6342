"""Compiled grammars for the engine's loop, which never waits for one: ask, sleep on `fileno`, poll.

One thread does the work. It builds the tables of the vocabulary, lets each grammar be tried out in the sandbox, and
compiles it here once it has been seen to be harmless, with the GIL released. Grammars asked for at the same time are
compiled once, and the latest are kept.
"""

from __future__ import annotations

import os
import select
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.foundation.errors import ConfigError, InputError, QuireError
from quire.foundation.log import get_logger
from quire.grammar.base import CompiledGrammar, GrammarError, Matcher
from quire.grammar.sandbox import Open, Sandbox, Try, Verdict
from quire.types.structured import FIELD, GrammarSpec

if TYPE_CHECKING:
    from quire.grammar.llguidance import LLGuidance

MAX_KEPT = 64  # compiled grammars
MAX_TRIES = 2  # of one grammar, if the sandbox ends under it
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The answer to a ticket: one of the two."""

    ticket: int
    grammar: CompiledGrammar | None = None
    error: InputError | None = None


@dataclass(slots=True)
class _Job:
    """A grammar in the making, and who waits for it."""

    number: int
    spec: GrammarSpec
    tickets: list[int]
    num_tries: int = 0


class GrammarService:
    """Used by one thread, the engine's.

    folder: of the tokenizer; None if the engine has none, and then every grammar is refused.
    vocab_size: tokens that have logits.
    stop_ids: what ends an answer by itself; allowed where the grammar may end.
    """

    def __init__(self, folder: Path | None, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._stop_ids = list(stop_ids)
        self._backend: LLGuidance | None = None
        self._sandbox: Sandbox | None = None
        self._num_tickets = 0
        self._lock = threading.Lock()  # of the five below
        self._jobs: dict[GrammarSpec, _Job] = {}
        self._asked: deque[_Job] = deque()
        self._kept: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._answers: deque[Compiled] = deque()
        self._is_closed = False
        self._news, self._new_answer = _pipe()
        self._wake, self._new_job = _pipe()
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    # The engine's side

    def ask(self, spec: GrammarSpec) -> int:
        """A ticket; its answer comes from `poll` sooner or later. Never waits."""
        with self._lock:
            self._num_tickets += 1
            ticket = self._num_tickets
            kept = self._kept.get(spec)
            if kept is not None:
                self._kept.move_to_end(spec)
                self._answer(Compiled(ticket, kept))
            elif spec in self._jobs:
                self._jobs[spec].tickets.append(ticket)
            else:
                job = self._jobs[spec] = _Job(ticket, spec, [ticket])
                self._asked.append(job)
                os.write(self._new_job, b"x")
        return ticket

    def poll(self) -> list[Compiled]:
        """Answers that have come since. Never waits."""
        with self._lock:
            if not self._answers:
                return []
            os.read(self._news, 1 << 16)
            answers = list(self._answers)
            self._answers.clear()
        return answers

    def fileno(self) -> int:
        """Readable while `poll` has answers."""
        return self._news

    def fill(self, matchers: Sequence[Matcher], rows: np.ndarray) -> None:
        """What each matcher allows next, on several cores. rows: int32 [matchers, ceil(vocab_size / 32)].

        A matcher that failed has an empty row.
        """
        assert self._backend is not None, "a matcher without a grammar"
        if len(matchers) > 1:
            self._backend.fill(matchers, rows)
            return
        for matcher, row in zip(matchers, rows, strict=True):
            try:
                matcher.fill(row)
            except GrammarError as error:
                _log.warning("%s", error)

    def close_soon(self, matcher: Matcher, budget: int, row: np.ndarray) -> None:
        """Like `matcher.fill`, but only what leaves the answer closable within `budget` tokens, the next included."""
        assert self._backend is not None, "a matcher without a grammar"
        try:
            self._backend.close_soon(matcher, budget, row)
        except GrammarError as error:
            _log.warning("%s", error)
            row.fill(0)

    def close(self) -> None:
        """End the process that compiles. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.write(self._new_job, b"x")
        self._thread.join()
        for fd in (self._news, self._new_answer, self._wake, self._new_job):
            os.close(fd)

    def _answer(self, answer: Compiled) -> None:
        """With the lock held."""
        if not self._answers:
            os.write(self._new_answer, b"x")
        self._answers.append(answer)

    # The thread

    def _run(self) -> None:
        problem = ""
        try:
            self._build()
        except QuireError as error:
            problem = str(error)
        except Exception as error:
            _log.exception("structured outputs are not available")
            problem = f"structured outputs are not available: {error}"
        running: dict[int, _Job] = {}
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
        if self._sandbox is not None:
            self._sandbox.close()

    def _build(self) -> None:
        """Raises ConfigError if this engine cannot bind answers."""
        if self._folder is None:
            raise ConfigError("structured outputs need a tokenizer, and skip_tokenizer_init is on")
        from quire.grammar.vocabulary import Vocabulary

        vocabulary = Vocabulary(self._folder, self._vocab_size, self._stop_ids)
        self._stop_ids = vocabulary.stop_ids
        try:
            from quire.grammar.llguidance import LLGuidance
        except ImportError:
            raise ConfigError("structured outputs need `pip install 'quire[structured]'` on the server") from None
        self._backend = LLGuidance(vocabulary)

    def _take_asked(self, running: dict[int, _Job], problem: str) -> None:
        with self._lock:
            asked, self._asked = list(self._asked), deque()
        if problem:
            for job in asked:
                self._finish(job, error=InputError(problem, FIELD))
            return
        running.update((job.number, job) for job in asked)  # all, before the first can fail
        for job in asked:
            self._try(job)

    def _take_verdicts(self, running: dict[int, _Job]) -> bool:
        """Wait for verdicts or for something to be asked; False if the sandbox has ended."""
        sources: list[Any] = [self._wake]
        if self._sandbox is not None:
            sources.append(self._sandbox.frames.socket)
        readable, _, _ = select.select(sources, [], [])
        if self._wake in readable:
            os.read(self._wake, 1 << 16)
        if self._sandbox is not None and self._sandbox.frames.socket in readable:
            try:
                verdicts = self._sandbox.frames.receive()
            except EOFError:
                _log.warning("the grammar sandbox ended; it is started again")
                return False
            for verdict in verdicts:
                self._judge(running.pop(verdict.number), verdict)
        return True

    def _try(self, job: _Job) -> None:
        if self._sandbox is None:
            self._sandbox = Sandbox(Open(str(self._folder), self._vocab_size, self._stop_ids))
        job.num_tries += 1
        self._sandbox.frames.send(Try(job.number, job.spec))

    def _restart(self, running: dict[int, _Job]) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None
        for job in list(running.values()):
            if job.num_tries < MAX_TRIES:
                self._try(job)
            else:
                del running[job.number]
                self._finish(job, error=InputError(f"the {job.spec.kind} cannot be compiled", FIELD))

    def _judge(self, job: _Job, verdict: Verdict) -> None:
        if verdict.error is not None:
            about = "" if verdict.param else f"the {job.spec.kind} "
            self._finish(job, error=InputError(f"{about}{verdict.error}", verdict.param or FIELD))
            return
        assert self._backend is not None
        try:
            grammar = self._backend.restore(job.spec, verdict.recipe)
        except InputError as error:
            self._finish(job, error=error)
        except Exception as error:  # one grammar's trouble must not end the thread that others wait for
            _log.exception("a grammar that passed the sandbox does not compile")
            self._finish(job, error=InputError(f"the {job.spec.kind} cannot be compiled: {error}", FIELD))
        else:
            self._finish(job, grammar)

    def _finish(self, job: _Job, grammar: CompiledGrammar | None = None, error: InputError | None = None) -> None:
        with self._lock:
            del self._jobs[job.spec]
            if grammar is not None:
                self._kept[job.spec] = grammar
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            for ticket in job.tickets:
                self._answer(Compiled(ticket, grammar, error))


def _pipe() -> tuple[int, int]:
    """A pipe that nobody waits at: its bytes only wake."""
    source, target = os.pipe()
    os.set_blocking(source, False)
    os.set_blocking(target, False)
    return source, target
