"""Compiled grammars for the engine's loop, which never waits for one: ask, sleep on `fileno`, poll.

A grammar is tried out first in a process of its own, with a limit to its time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.foundation.errors import InputError
from quire.grammar.base import CompiledGrammar, Matcher
from quire.types.structured import GrammarSpec


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
    """

    def __init__(self, folder: Path | None, vocab_size: int, stop_ids: Sequence[int]) -> None: ...

    def ask(self, spec: GrammarSpec) -> int:
        """A ticket; its answer comes from `poll` sooner or later. Never waits."""
        raise NotImplementedError

    def poll(self) -> list[Compiled]:
        """Answers that have come since. Never waits."""
        raise NotImplementedError

    def fileno(self) -> int:
        """Readable while `poll` has answers."""
        raise NotImplementedError

    def fill(self, matchers: Sequence[Matcher], rows: np.ndarray) -> None:
        """What each matcher allows next, on several cores. rows: int32 [matchers, ceil(vocab_size / 32)].

        A matcher that failed has an empty row.
        """
        raise NotImplementedError

    def close_soon(self, matcher: Matcher, budget: int, row: np.ndarray) -> None:
        """Like `matcher.fill`, but only what leaves the answer closable within `budget` tokens, the next included."""
        raise NotImplementedError

    def close(self) -> None:
        """End the process that compiles. Idempotent."""
        raise NotImplementedError
