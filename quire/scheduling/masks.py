"""The masks of a step: a bit for each token that a row may sample, made when all tokens before it are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from quire.scheduling.constraint import TokenMatcher
from quire.scheduling.request import Request
from quire.types.plan import TokenMasks


class MaskSource(Protocol):
    """Whoever knows the grammars, and made the matchers. rows: int32 [matchers, ceil(vocabulary / 32)]."""

    def fill(self, matchers: Sequence[Any], rows: np.ndarray) -> None:
        """Write what each matcher allows next over whatever is there. A matcher that failed gets an empty row."""
        ...

    def close_soon(self, matcher: Any, budget: int, row: np.ndarray) -> None:
        """The same for one, less what could not be closed within `budget` tokens, the next included."""
        ...


def make_masks(
    step: int, rows: Sequence[tuple[int, Request]], vocab_size: int, source: MaskSource | None
) -> TokenMasks:
    """rows: plan rows that may be bound, rising, and their requests, of whom all tokens before the step are known.

    Those that are not bound, or over by now, get no mask. source: needed by requests with a grammar.
    """
    bound = [
        (row, request, request.constraint)
        for row, request in rows
        if not request.is_finished and request.constraint is not None and request.constraint.may_bind(0)
    ]
    bits = np.empty((len(bound), -(-vocab_size // 32)), np.int32)
    lines: list[int] = []
    matchers: list[TokenMatcher] = []
    for line, (_, request, state) in enumerate(bound):
        if state.matcher is None:
            bits[line] = 0
            continue
        assert source is not None
        if state.close_at_limit:
            source.close_soon(state.matcher, request.limit - len(request.tokens), bits[line])
        else:
            lines.append(line)
            matchers.append(state.matcher)
    if matchers:
        assert source is not None
        filled = bits if len(lines) == len(bound) else bits[lines]
        source.fill(matchers, filled)
        if filled is not bits:
            bits[lines] = filled
    for line, (_, _, state) in enumerate(bound):
        state.allow_marker(bits[line])
    return TokenMasks(step, np.array([row for row, _, _ in bound], np.int32), bits)
