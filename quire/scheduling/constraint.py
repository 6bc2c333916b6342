"""What one answer may hold at its next place: its thinking, then its grammar.

The state follows the tokens of the answer as they are read, all of them, in order. Nothing is forbidden inside the
thinking, until its budget is spent: then the rest of the end marker is the only way on. So it is after a stop token,
if a grammar waits: that ends the thinking and not the answer, which is yet to come. Markers are found in the token
stream, whatever was sampled before them. After the thinking the grammar binds every token; when it is complete, so that
only a stop token could follow, the answer ends there and then.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import numpy as np

from quire.foundation.errors import InputError
from quire.foundation.marker import Marker
from quire.types.structured import Constraint, Thinking


class TokenMatcher(Protocol):
    """How far one answer has come in its grammar."""

    def accept(self, token: int) -> bool:
        """Go on by one token; False, and nothing is changed, if the grammar does not allow it."""
        ...

    @property
    def is_done(self) -> bool:
        """Only a stop token may follow, or one came."""
        ...


MakeMatcher = Callable[[], TokenMatcher]


class Phase(IntEnum):
    START = 0  # a thinking that may or may not come: it begins here, or the answer itself does
    THINKING = 1
    GRAMMAR = 2
    FREE = 3  # nothing binds any more


class ConstraintState:
    """make_matcher: None if there is no grammar; stops: tokens that end the answer.

    Raises InputError for markers that are no tokens.
    """

    __slots__ = (
        "_end",
        "_make_matcher",
        "_matched",
        "_num_thought",
        "_start",
        "_stops",
        "close_at_limit",
        "is_refused",
        "matcher",
        "max_thought",
        "outlives_stop",
        "phase",
    )

    def __init__(
        self,
        constraint: Constraint,
        make_matcher: MakeMatcher | None,
        vocab_size: int,
        stops: frozenset[int] = frozenset(),
    ) -> None:
        thinking = constraint.thinking
        if thinking is not None:
            _check(thinking, vocab_size)
        self.close_at_limit = constraint.close_at_limit
        self.is_refused = False  # a token came that the grammar does not allow
        self.outlives_stop = False  # the last token came inside a thinking, and a grammar waits
        self.matcher: TokenMatcher | None = None  # the one that binds the next token
        self.max_thought = None if thinking is None else thinking.max_tokens
        self._make_matcher = make_matcher
        self._stops = stops
        self._start = () if thinking is None else tuple(thinking.start)
        self._end = Marker(()) if thinking is None else Marker(thinking.end, thinking.end_seam)
        self._matched = 0  # tokens of the marker that is looked for
        self._num_thought = 0
        if thinking is None or (thinking.state == "maybe" and not thinking.start):
            self._begin_answer()
        elif thinking.state == "open":
            self.phase = Phase.THINKING
        else:
            self.phase = Phase.START
            self.matcher = make_matcher and make_matcher()

    @property
    def is_done(self) -> bool:
        """The answer is complete: nothing but a stop token could follow."""
        return self.phase is Phase.GRAMMAR and self.matcher is not None and self.matcher.is_done

    def may_bind(self, num_unseen: int) -> bool:
        """Whether something may be forbidden after so many more tokens; exact if these are none."""
        has_grammar = self._make_matcher is not None
        if self.phase is Phase.THINKING:
            if has_grammar and num_unseen and (self._stops or self._matched + num_unseen >= len(self._end.tokens)):
                return True
            return self._may_be_spent(self._num_thought + num_unseen)
        if self.phase is Phase.START:
            return has_grammar or self._may_be_spent(self._matched + num_unseen - len(self._start))
        return self.phase is Phase.GRAMMAR

    def allow_marker(self, bits: np.ndarray) -> None:
        """Set the bit of the marker token that may come beside what the grammar allows.

        bits: int32 [ceil(vocabulary / 32)].
        """
        if self.phase is Phase.THINKING:
            token = self._end.tokens[self._matched]
        elif self.phase is Phase.START:
            token = self._start[self._matched]
        else:
            return
        bits.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def advance(self, token: int) -> bool:
        """Take the next token in. Returns whether the answer ends with it: it is complete, or was refused."""
        self.outlives_stop = self.phase is Phase.THINKING and self._make_matcher is not None
        if self.phase is Phase.GRAMMAR:
            self._accept(token)
        elif self.phase is Phase.THINKING:
            self._num_thought += 1
            self._matched = self._end.follow(self._matched, token)
            if self._matched == len(self._end.tokens):
                self._begin_answer()
            elif self.outlives_stop and token in self._stops:
                self.max_thought = self._num_thought
        elif self.phase is Phase.START:
            self._take_first(token)
        return self.is_refused or self.is_done

    def _take_first(self, token: int) -> None:
        if token == self._start[self._matched]:
            self._matched += 1
            if self._matched == len(self._start):
                self.phase, self.matcher, self._matched = Phase.THINKING, None, 0
            elif self.matcher is not None and not self.matcher.accept(token):
                self.matcher = None  # from here on only the marker goes on
        elif self._make_matcher is None:
            self.phase = Phase.FREE
        else:
            self.phase = Phase.GRAMMAR
            self._accept(token)

    def _accept(self, token: int) -> None:
        if self.matcher is None or not self.matcher.accept(token):
            self.is_refused = True

    def _begin_answer(self) -> None:
        if self._make_matcher is None:
            self.phase = Phase.FREE
        else:
            self.phase, self.matcher = Phase.GRAMMAR, self._make_matcher()

    def _may_be_spent(self, num_thought: int) -> bool:
        return self.max_thought is not None and num_thought >= self.max_thought


def _check(thinking: Thinking, vocab_size: int) -> None:
    if not thinking.end:
        raise InputError("the end marker of the thinking must hold at least 1 token", "thinking")
    for token in (*thinking.start, *thinking.end):
        if not 0 <= token < vocab_size:
            raise InputError(f"markers of the thinking must be tokens in [0, {vocab_size}), got {token}", "thinking")
    if not 0 <= thinking.end_seam < len(thinking.end):
        raise InputError(f"the seam of the end marker must lie within it, got {thinking.end_seam}", "thinking")
    if thinking.max_tokens is not None and thinking.max_tokens < 0:
        raise InputError(f"the budget of the thinking must be >= 0 tokens, got {thinking.max_tokens}", "thinking")
