"""The contract of grammar backends: a compiled grammar makes matchers, a matcher follows one answer and says what may
come next."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.foundation.errors import QuireError
from quire.types.structured import GrammarSpec


class GrammarError(QuireError):
    """A matcher cannot go on: the grammar became too costly for its limits. It ends that answer alone."""


class Matcher(Protocol):
    """How far one answer has come in its grammar. Used by one thread at a time."""

    def accept(self, token: int) -> bool:
        """Go on by one token; False, and nothing has changed, if the grammar does not allow it.

        A stop token is accepted where the grammar may end, and ends it.
        """
        ...

    def fill(self, row: np.ndarray) -> None:
        """Write what may come next, stop tokens included. row: int32 [ceil(vocabulary / 32)], a bit a token.

        Raises GrammarError.
        """
        ...

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete as it is: a stop token may follow."""
        ...

    @property
    def is_done(self) -> bool:
        """Only a stop token may follow, or one came."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        ...

    def fork(self) -> Matcher:
        """Another answer that has come as far."""
        ...


class CompiledGrammar(Protocol):
    spec: GrammarSpec

    def matcher(self) -> Matcher:
        """At the beginning of an answer; microseconds."""
        ...
