"""Masks that are kept: those of places in regular expressions where much of the vocabulary may follow."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import numpy as np

from quire.grammar.llguidance.regex_states import RegexState, RegexStates

MAX_BYTES = 64 * 1024**2  # of all regexes together
_LEAST_WORDS = 64  # of a row that are not 0: what has fewer is found as fast as it is kept


class MaskCache:
    """The latest rows used, by whatever says what they hold."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[Any, np.ndarray] = OrderedDict()

    def get(self, key: Any) -> np.ndarray | None:
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
        return row

    def put(self, key: Any, row: np.ndarray) -> None:
        self._rows[key] = row.copy()
        if len(self._rows) * row.nbytes > self._max_bytes:
            self._rows.popitem(last=False)


class PlaceMasks:
    """Of one grammar, a regex; `start` is None if its masks are not kept."""

    _numbers = itertools.count()

    def __init__(self, pattern: str, tokens: list[bytes], cache: MaskCache) -> None:
        self._states = RegexStates(pattern)
        self._tokens = tokens
        self._cache = cache
        self._number = next(self._numbers)

    @property
    def start(self) -> RegexState | None:
        return self._states.start

    def after(self, place: RegexState, token: int) -> RegexState | None:
        return self._states.after(place, self._tokens[token])

    def get(self, place: RegexState) -> np.ndarray | None:
        return None if self._states.start is None else self._cache.get((self._number, place))

    def put(self, place: RegexState, row: np.ndarray, matcher: Any) -> None:
        """Keep what the library's matcher allows at this place, if it is much and depends on the place alone.

        Where the next bytes are certain, it also depends on the tokens before, for it allows their usual tokens.
        """
        if np.count_nonzero(row) < _LEAST_WORDS or matcher.compute_ff_bytes():
            return
        if matcher.is_accepting() != (place.term.nullable and not place.rest):
            self._states.start = None  # the library reads the pattern otherwise: nothing that was kept counts
            return
        self._cache.put((self._number, place), row)
