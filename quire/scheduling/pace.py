"""Pace: what steps take, and how many prompt tokens one may bring while others watch their tokens come.

A prompt that is computed in one go holds up every decoding request for as long as it takes. So a step with readers
waiting for its tokens has a time to keep: that of a decode step and a bit, more the longer prompts have waited, and
hardly more than `LONGEST`. Under little load streams stay smooth; under much load steps grow until prompts are computed
as fast as they come. What a token costs is learned from the steps measured: the time of a decode step is taken off, the
rest is proportional to the prompt tokens (least squares through the origin over the last steps).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

LONGEST = 0.1  # seconds that a step should take at most, however long prompts have waited
LEAST = 0.005  # seconds that prompts get in a step at least …
LEAST_STEPS = 1.5  # … and in decode steps
WAIT_SHARE = 1 / 5  # of the time that the oldest prompt has waited: prompts may take that in a step
MIN_TOKENS = 128  # fewer are not worth a step
_NUM_DECODES = 16  # latest steps without prompt tokens whose shortest counts: what delayed the others was not the work
_NUM_MIXED = 32  # latest steps with prompt tokens that count: one that something delayed is forgotten soon


class Pace:
    """Times in seconds. `observe` is told every step; what nothing is known of yet is not bounded.

    sizes: (decode rows, tokens in all) of padded steps; see WorkerReport.mixed_sizes.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]] = ()) -> None:
        self._prompts: dict[int, list[int]] = {}  # prompt tokens that fill a padded step up, by its decode rows
        for rows, tokens in sorted(sizes):
            if tokens - rows >= MIN_TOKENS // 2:
                self._prompts.setdefault(rows, []).append(tokens - rows)
        self._decodes: deque[float] = deque(maxlen=_NUM_DECODES)
        self._mixed: deque[tuple[int, float]] = deque(maxlen=_NUM_MIXED)  # (prompt tokens, what they added)
        self.decode_seconds = 0.0  # a step without prompt tokens takes; 0 while unknown
        self.token_seconds = 0.0  # a prompt token adds; 0 while unknown

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens, decode rows or not, took so long."""
        if prompt_tokens == 0:
            self._decodes.append(seconds)
            self.decode_seconds = min(self._decodes)
            return
        self._mixed.append((prompt_tokens, max(0.0, seconds - self.decode_seconds)))
        squared = sum(tokens * tokens for tokens, _ in self._mixed)
        self.token_seconds = sum(tokens * added for tokens, added in self._mixed) / squared

    def predict(self, prompt_tokens: int) -> float:
        """How long a step will take; 0 if nothing like it was seen."""
        return self.decode_seconds + self.token_seconds * prompt_tokens

    def prompt_tokens(self, waited: float, num_decodes: int) -> int | None:
        """Most prompt tokens for a step with so many decode rows, some of them read, when the oldest prompt has waited
        so long; None: any number."""
        if self.token_seconds == 0.0:
            return None
        decode = self.decode_seconds
        spend = max(LEAST, LEAST_STEPS * decode, min(waited * WAIT_SHARE, LONGEST - decode))
        return self._filling(max(MIN_TOKENS, math.floor(spend / self.token_seconds)), num_decodes)

    def _filling(self, wanted: int, num_decodes: int) -> int:
        """The number next to `wanted` that fills a padded step up; `wanted` itself if it is more than those hold."""
        rows = min((rows for rows in self._prompts if rows >= num_decodes), default=None)
        if rows is None or wanted > self._prompts[rows][-1]:
            return wanted
        return min(self._prompts[rows], key=lambda tokens: abs(math.log(tokens / wanted)))
