"""The grammars that requests wait for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from quire.config.resolve import Resolved, locate_tokenizer
from quire.foundation.errors import InputError
from quire.grammar.base import CompiledGrammar, Matcher
from quire.grammar.service import GrammarService
from quire.types.structured import GrammarSpec


class Grammars:
    """The engine's side of the grammar service, by request ids. Used by the engine's thread; never waits."""

    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved
        self._folder: Path | None = None  # of the tokenizer
        self._service: GrammarService | None = None
        self._tickets: dict[str, int] = {}  # of the requests that wait
        self._requests: dict[int, str] = {}  # the reverse

    def start(self) -> None:
        """Find the tokenizer. Raises ConfigError if it is not there."""
        self._folder = locate_tokenizer(self._resolved)

    @property
    def can_prepare(self) -> bool:
        """Whether there is something to prepare for grammars that may come."""
        return self._service is None and self._resolved.pooler is None

    def prepare(self) -> None:
        """Begin to make the tables of the vocabulary, and start what compiles. Idempotent.

        For a vocabulary of 128k tokens half a second of this holds the interpreter lock, and it takes 100 MB: so it is
        done when the engine has nothing else to do, or else when the first grammar is asked for.
        """
        self._prepared()

    def _prepared(self) -> GrammarService:
        if self._service is None:
            info, replies = self._resolved.info, self._resolved.config.replies
            self._service = GrammarService(self._folder, info.vocab_size, info.eos_token_ids, replies.grammar_backend)
        return self._service

    @property
    def sentinels(self) -> tuple[int, ...]:
        """File descriptors that are readable while `poll` has something."""
        return () if self._service is None else (self._service.fileno(),)

    def ask(self, request_id: str, spec: GrammarSpec) -> None:
        """`poll` will have the request's grammar."""
        ticket = self._prepared().ask(spec)
        self._tickets[request_id] = ticket
        self._requests[ticket] = request_id

    def forget(self, request_ids: Iterable[str]) -> None:
        """These do not wait any more; unknown ids are ignored."""
        for request_id in request_ids:
            ticket = self._tickets.pop(request_id, None)
            if ticket is not None:
                del self._requests[ticket]

    def poll(self) -> list[tuple[str, CompiledGrammar | InputError]]:
        """The requests that wait no more, each with its grammar or with what is wrong with it."""
        if self._service is None:
            return []
        found: list[tuple[str, CompiledGrammar | InputError]] = []
        for answer in self._service.poll():
            request_id = self._requests.pop(answer.ticket, None)
            if request_id is None:
                continue  # aborted meanwhile
            del self._tickets[request_id]
            if answer.grammar is not None:
                found.append((request_id, answer.grammar))
            elif answer.error is not None:
                found.append((request_id, answer.error))
        return found

    def fill(self, matchers: Sequence[Matcher], rows: np.ndarray) -> None:
        """See `scheduling.masks.MaskSource`."""
        assert self._service is not None, "a matcher without a grammar"
        self._service.fill(matchers, rows)

    def close_soon(self, matcher: Matcher, budget: int, row: np.ndarray) -> None:
        """See `scheduling.masks.MaskSource`."""
        assert self._service is not None, "a matcher without a grammar"
        self._service.close_soon(matcher, budget, row)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None
