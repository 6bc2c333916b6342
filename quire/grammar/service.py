"""Compiled grammars for the engine's loop, which never waits for one: ask, sleep on `fileno`, poll.

Grammars asked for at the same time are compiled once, and the latest are kept. Each backend has a worker of its
own, which is there from the first grammar that needs it; the usual one from the beginning.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from quire.foundation.errors import ConfigError, InputError
from quire.foundation.log import get_logger
from quire.grammar.base import CompiledGrammar, GrammarError, Matcher
from quire.grammar.compiler_worker import CompilerWorker, Job, pipe
from quire.grammar.sandbox import Open
from quire.grammar.vocabulary import Vocabulary
from quire.types.structured import GrammarSpec

MAX_KEPT = 64  # compiled grammars
DEFAULT_BACKEND = "llguidance"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The answer to a ticket: one of the two."""

    ticket: int
    grammar: CompiledGrammar | None = None
    error: InputError | None = None


class GrammarService:
    """Used by one thread, the engine's.

    folder: of the tokenizer; None if the engine has none, and then every grammar is refused.
    vocab_size: tokens that have logits.
    stop_ids: what ends an answer by itself; allowed where the grammar may end.
    usual: the backend of grammars that name none.
    """

    def __init__(
        self, folder: Path | None, vocab_size: int, stop_ids: Sequence[int], usual: str = DEFAULT_BACKEND
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._stop_ids = list(stop_ids)
        self._usual = usual
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._num_tickets = 0
        self._lock = threading.Lock()  # of the three below
        self._jobs: dict[GrammarSpec, Job] = {}
        self._kept: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._answers: deque[Compiled] = deque()
        self._is_closed = False
        self._news, self._new_answer = pipe()
        self._workers: dict[str, CompilerWorker] = {}  # by backend
        self._worker(usual)

    def ask(self, spec: GrammarSpec) -> int:
        """A ticket; its answer comes from `poll` sooner or later. Never waits."""
        if spec.backend == "auto":
            spec = msgspec.structs.replace(spec, backend=self._usual)
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
                job = self._jobs[spec] = Job(ticket, spec, [ticket])
                self._worker(spec.backend).ask(job)
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
        names = {matcher.backend for matcher in matchers}
        if len(matchers) == 1:
            self._fill_one(matchers[0], rows[0])
        elif len(names) == 1:
            self._workers[names.pop()].backend.fill(matchers, rows)
        else:
            for name in names:
                lines = [line for line, matcher in enumerate(matchers) if matcher.backend == name]
                own = np.empty((len(lines), rows.shape[1]), np.int32)
                self._workers[name].backend.fill([matchers[line] for line in lines], own)
                rows[lines] = own

    def close_soon(self, matcher: Matcher, budget: int, row: np.ndarray) -> None:
        """Like `matcher.fill`, but only what leaves the answer closable within `budget` tokens, the next included."""
        try:
            self._workers[matcher.backend].backend.close_soon(matcher, budget, row)
        except GrammarError as error:
            _log.warning("%s", error)
            row.fill(0)

    def close(self) -> None:
        """End the processes that compile. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for worker in self._workers.values():
            worker.close()
        for fd in (self._news, self._new_answer):
            os.close(fd)

    def _fill_one(self, matcher: Matcher, row: np.ndarray) -> None:
        try:
            matcher.fill(row)
        except GrammarError as error:
            _log.warning("%s", error)

    def _answer(self, answer: Compiled) -> None:
        """With the lock held."""
        if not self._answers:
            os.write(self._new_answer, b"x")
        self._answers.append(answer)

    def _worker(self, name: str) -> CompilerWorker:
        if name not in self._workers:
            opening = Open(name, str(self._folder), self._vocab_size, self._stop_ids)
            self._workers[name] = CompilerWorker(opening, self._read_vocabulary, self._finish)
        return self._workers[name]

    # On a worker's thread

    def _read_vocabulary(self) -> Vocabulary:
        """The one of all benches. Raises ConfigError if its tokens cannot be spelled."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                if self._folder is None:
                    raise ConfigError("structured outputs need a tokenizer, and skip_tokenizer_init is on")
                self._vocabulary = Vocabulary(self._folder, self._vocab_size, self._stop_ids)
            return self._vocabulary

    def _finish(self, job: Job, found: CompiledGrammar | InputError) -> None:
        with self._lock:
            del self._jobs[job.spec]
            if isinstance(found, InputError):
                for ticket in job.tickets:
                    self._answer(Compiled(ticket, error=found))
                return
            self._kept[job.spec] = found
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            for ticket in job.tickets:
                self._answer(Compiled(ticket, found))
