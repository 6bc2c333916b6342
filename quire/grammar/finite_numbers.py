"""Keeps the numbers of a JSON answer finite: models fall into endless digits, which every JSON grammar allows."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from quire.grammar.vocabulary import LONGEST_NUMBER

LONGEST_EXPONENT = 2  # digits; then every number is finite as a float
_TEXT, _STRING, _ESCAPE = range(3)
_DIGITS, _E, _SIGN = frozenset(b"0123456789"), frozenset(b"eE"), frozenset(b"+-")


class DigitTable:
    """How many digits each token of a vocabulary begins with."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self._leading = np.array([len(t) - len(t.lstrip(b"0123456789")) for t in tokens], np.uint8)
        self.longest = int(self._leading.max(initial=0))
        self.at_most = lru_cache(LONGEST_NUMBER + 1)(self._at_most)

    def _at_most(self, num_digits: int) -> np.ndarray:
        """Bits of the tokens that begin with at most so many digits; int32 [ceil(vocabulary / 32)]."""
        bits = np.packbits(self._leading <= num_digits, bitorder="little")
        return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


class DigitLimit:
    """Follows one JSON text: whether it is inside a string, and how many digits came last."""

    __slots__ = ("_history", "_state", "_table")

    def __init__(self, table: DigitTable) -> None:
        self._table = table
        self._state = (_TEXT, 0, LONGEST_NUMBER)  # where; digits that came last; digits allowed
        self._history: list[tuple[int, int, int]] = []

    def push(self, token: int) -> None:
        self._history.append(self._state)
        where, run, limit = self._state
        for byte in self._table.tokens[token]:
            if where == _STRING:
                where = _ESCAPE if byte == 0x5C else _TEXT if byte == 0x22 else _STRING
            elif where == _ESCAPE:
                where = _STRING
            elif byte in _DIGITS:
                run += 1
            else:
                where = _STRING if byte == 0x22 else _TEXT
                begins_exponent = byte in _E and run > 0
                goes_on = byte in _SIGN and run == 0 and limit == LONGEST_EXPONENT
                run, limit = 0, LONGEST_EXPONENT if begins_exponent or goes_on else LONGEST_NUMBER
        self._state = where, run, limit

    def rollback(self, num_tokens: int) -> None:
        self._state = self._history[-num_tokens]
        del self._history[-num_tokens:]

    def fork(self) -> DigitLimit:
        other = DigitLimit(self._table)
        other._state, other._history = self._state, self._history.copy()
        return other

    def cut(self, row: np.ndarray) -> None:
        """Take the tokens out of `row` that would make the number too long, unless nothing else is allowed.

        row: int32 [ceil(vocabulary / 32)].
        """
        where, run, limit = self._state
        if where != _TEXT or run + self._table.longest <= limit:
            return
        left = row & self._table.at_most(max(0, limit - run))
        if left.any():
            row[:] = left
