"""PrefillBudget: what steps take, and how many prompt tokens one may bring while others watch their tokens come.

A prompt that is computed in one go holds up every decoding request for as long as it takes. So a step with readers
waiting for its tokens has a time to keep: that of a decode step and a bit, more the longer prompts have waited, and
hardly more than `LONGEST`. Under little load streams stay smooth; under much load steps grow until prompts are computed
as fast as they come.

A chunk's work is its tokens, and more of them the more tokens each attends to. What a token of work costs is learned
from the steps measured: the time of a decode step is taken off, the rest is proportional to the work (least squares
through the origin over the last steps). How much attention adds to a token, against all the rest of it, follows from
the model's shape (`PromptCost`); as far as that is wrong, what a token costs follows the context that it is learned at.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from quire.types.kv import PromptCost

LONGEST = 0.1  # seconds that a step should take at most, however long prompts have waited …
LONGEST_OF_MANY = 0.08  # … and for a prompt that takes many steps anyway, all of which the readers have to live with:
MANY = 5  # such as it takes more than so many of the longest for
LEAST = 0.005  # seconds that prompts get in a step at least …
LEAST_STEPS = 1.5  # … and in decode steps
WAIT_SHARE = 1 / 5  # of the time that the oldest prompt has waited: prompts may take that in a step
MIN_TOKENS = 128  # fewer are not worth a step
SHORT = 4096  # tokens whose attention counts as part of what a token costs
_NUM_DECODES = 16  # latest steps without prompt tokens whose shortest counts: what delayed the others was not the work
_NUM_MIXED = 32  # latest steps with prompt tokens that count: one that something delayed is forgotten soon


class PrefillBudget:
    """Times in seconds, work in prompt tokens of short context. `observe` is told every step; what nothing is known of
    yet is not bounded.

    sizes: (decode rows, tokens in all) of padded steps; see WorkerReport.mixed_sizes.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]] = (), cost: PromptCost | None = None) -> None:
        self._cost = cost or PromptCost()
        self._prompts: dict[int, list[int]] = {}  # prompt tokens that fill a padded step up, by its decode rows
        for rows, tokens in sorted(sizes):
            if tokens - rows >= MIN_TOKENS // 2:
                self._prompts.setdefault(rows, []).append(tokens - rows)
        self._decodes: deque[float] = deque(maxlen=_NUM_DECODES)
        self._mixed: deque[tuple[float, float]] = deque(maxlen=_NUM_MIXED)  # (work, what it added)
        self.decode_seconds = 0.0  # a step without prompt tokens takes; 0 while unknown
        self.token_seconds = 0.0  # a token of work adds; 0 while unknown

    def observe(self, work: float, seconds: float) -> None:
        """A step with so much work on prompts, decode rows or not, took so long."""
        if work == 0:
            self._decodes.append(seconds)
            self.decode_seconds = min(self._decodes)
            return
        self._mixed.append((work, max(0.0, seconds - self.decode_seconds)))
        squared = sum(work * work for work, _ in self._mixed)
        self.token_seconds = sum(work * added for work, added in self._mixed) / squared

    def predict(self, work: float) -> float:
        """How long a step will take; 0 if nothing like it was seen."""
        return self.decode_seconds + self.token_seconds * work

    def work(self, tokens: int, context: int) -> float:
        """Of a chunk of so many tokens behind `context` others."""
        cost, seen = self._cost, context + tokens / 2
        attending = -(-tokens // cost.wave) * cost.wave if cost.wave else tokens
        far = cost.attention * max(0.0, seen - SHORT)
        for window, attention in cost.windows:
            far += attention * max(0.0, min(seen, window) - SHORT)
        return tokens + attending * far

    def allowance(self, waited: float, num_decodes: int, longest: int = 0) -> int | None:
        """Most work on prompts for a step with so many decode rows, some of them read, when the oldest prompt has
        waited so long and the longest has so many tokens; None: any."""
        if self.token_seconds == 0.0:
            return None
        decode, bound = self.decode_seconds, LONGEST
        if self.work(longest, 0) * self.token_seconds > MANY * LONGEST:
            bound = LONGEST_OF_MANY
        spend = max(LEAST, LEAST_STEPS * decode, min(waited * WAIT_SHARE, bound - decode))
        return self._filling(max(MIN_TOKENS, math.floor(spend / self.token_seconds)), num_decodes)

    def tokens(self, allowance: int | float, context: int, *, is_first: bool) -> int:
        """Most tokens for a chunk behind `context` others when so much work is left; is_first: in the step, which has
        to bring something."""
        least, most = 0, max(0, math.floor(allowance))
        if self.work(most, context) <= allowance:
            return most
        while least < most:
            middle = (least + most + 1) // 2
            if self.work(middle, context) <= allowance:
                least = middle
            else:
                most = middle - 1
        wave = self._cost.wave
        whole = least // wave * wave if wave else 0
        # A wave that is hardly begun takes as long as a whole one.
        if whole and whole * self.work(least, context) > least * self.work(whole, context):
            least = whole
        if not is_first:
            return least if least >= MIN_TOKENS else 0
        # Where attention is most of it, less than a wave saves next to nothing.
        is_far = self.work(wave, context) >= 2 * wave if wave else False
        return max(least, wave if is_far else MIN_TOKENS)

    def _filling(self, wanted: int, num_decodes: int) -> int:
        """The number next to `wanted` that fills a padded step up; `wanted` itself if it is more than those hold."""
        rows = min((rows for rows in self._prompts if rows >= num_decodes), default=None)
        if rows is None or wanted > self._prompts[rows][-1]:
            return wanted
        return min(self._prompts[rows], key=lambda tokens: abs(math.log(tokens / wanted)))
