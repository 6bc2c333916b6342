"""A marker in a stream of tokens, found as they come."""

from __future__ import annotations

from collections.abc import Sequence


class Marker:
    """A token sequence, found wherever it comes in a stream (Knuth, Morris and Pratt, 1977).

    seam: after so many of its tokens others may come before the rest does; 0: none may.
    """

    __slots__ = ("_fallback", "_seam", "tokens")

    def __init__(self, tokens: Sequence[int], seam: int = 0) -> None:
        self.tokens = tuple(tokens)
        self._seam = seam
        self._fallback = [0] * len(self.tokens)  # of the first i + 1 tokens: the longest proper end that begins it too
        for i in range(1, len(self.tokens)):
            self._fallback[i] = self._plainly(self._fallback[i - 1], self.tokens[i])

    def follow(self, matched: int, token: int) -> int:
        """How many tokens of the marker the stream ends with, after `matched` (less than all) and one token more."""
        if not 0 < self._seam <= matched or self.tokens[matched] == token:
            return self._plainly(matched, token)
        if self.tokens[self._seam] == token:
            return self._seam + 1
        return 1 if self.tokens[0] == token else self._seam

    def _plainly(self, matched: int, token: int) -> int:
        while matched and self.tokens[matched] != token:
            matched = self._fallback[matched - 1]
        return matched + 1 if self.tokens[matched] == token else 0
