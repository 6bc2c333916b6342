"""The contract of grammar backends: a compiled grammar makes matchers, a matcher follows one answer and says what may
come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from quire.foundation.errors import QuireError
from quire.grammar.ending.hints import Hints
from quire.grammar.vocabulary import Vocabulary
from quire.types.structured import GrammarSpec


class GrammarError(QuireError):
    """A matcher cannot go on: the grammar became too costly for its limits. It ends that answer alone."""


class Recipe(msgspec.Struct, frozen=True):
    """A grammar in its backend's own form, and what may close an answer under it."""

    source: str
    hints: Hints


class Matcher(Protocol):
    """How far one answer has come in its grammar. Used by one thread at a time."""

    @property
    def backend(self) -> str:
        """Its name in GRAMMAR_BACKENDS."""
        ...

    def accept(self, token: int) -> bool:
        """Go on by one token; False, and nothing has changed, if the grammar does not allow it.

        A stop token is accepted where the grammar may end, and ends it.
        """
        ...

    def fill(self, row: np.ndarray) -> None:
        """Write what may come next, stop tokens included.

        Args:
            row: a bit a token.

        Raises:
            GrammarError: the grammar has failed.

        Shapes:
            row: int32 [ceil(vocabulary / 32)].
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


class Backend(Protocol):
    """All grammars of one library for one vocabulary."""

    vocabulary: Vocabulary

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """`recipe` and `build` in one.

        Raises:
            InputError: the grammar is wrong, or costs too much.
        """
        ...

    def recipe(self, spec: GrammarSpec) -> Recipe:
        """All that takes Python to compile.

        Raises:
            InputError: the grammar is wrong, or costs too much.
        """
        ...

    def build(self, spec: GrammarSpec, recipe: Recipe) -> CompiledGrammar:
        """The rest, without the GIL.

        Args:
            spec: the grammar.
            recipe: what `recipe` made of it, here or in another process.

        Raises:
            InputError: the grammar is wrong, or costs too much.
        """
        ...

    def fill(self, matchers: Sequence[Matcher], rows: np.ndarray) -> None:
        """Fill the rows of many at once; those of matchers that failed are left empty.

        Shapes:
            rows: int32 [matchers, ceil(vocabulary / 32)].
        """
        ...

    def way_to_end(self, matcher: Matcher) -> list[int] | None:
        """Tokens that complete the answer, not many; None if none are found."""
        ...

    def close_soon(self, matcher: Matcher, budget: int, row: np.ndarray) -> None:
        """See `GrammarService.close_soon`.

        Raises:
            GrammarError: the grammar has failed.
        """
        ...
