"""Finds the moment when an answer has become the same few tokens over and over."""

from __future__ import annotations

from array import array

import numpy as np

from quire.types.repetition import RepetitionDetectionParams


class RepetitionDetector:
    """Follows one answer, token by token.

    The last tokens are `count` times a pattern of length d exactly if (count - 1) * d tokens in a row equalled the one
    d before. So a counter for every d is all that is remembered, and one comparison for each all that a token costs.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        """max_pattern_size: not 0."""
        low, high = max(1, params.min_pattern_size), params.max_pattern_size
        self._distances = np.arange(high, low - 1, -1)  # falling, as the tokens stand
        self._wanted = self._distances * (params.min_count - 1)
        self._equal = np.zeros(len(self._distances), np.int64)  # tokens in a row that equalled the one so far before

    def advance(self, tokens: array[int], first: int) -> bool:
        """Take in the last of `tokens`, of which those from `first` on are the answer. Returns whether it repeats."""
        high, low = int(self._distances[0]), int(self._distances[-1])
        last = len(tokens) - 1
        begin = max(first, last - high)
        before = np.frombuffer(tokens[begin : max(begin, last - low + 1)], np.int32)
        fresh = self._equal[len(self._equal) - len(before) :]  # of the distances that lie within the answer
        np.add(fresh, 1, out=fresh)
        fresh *= before == tokens[last]
        return bool((self._equal >= self._wanted).any())
