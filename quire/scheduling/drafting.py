"""Drafting: whether the decode rows of a step bring drafts, decided by what was learned when steps were settled.

A step with drafts costs more and may bring more: it pays if the tokens expected grow by more than the seconds. Each
request has an estimate of the probability that its next draft is right, from all steps: one without drafts tells for
free whether the first would have been. So requests whose text cannot be guessed never cost a wider step, and one that
begins to repeat itself is seen within a few tokens. Seconds are measured at the start by the worker, and as steps go;
what was measured is forgotten after a while, so that no conclusion lasts for ever.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

from quire.types.kv import DraftCost

MEMORY = 0.8  # what a draft's outcome weighs a step later
DOUBT = 0.5  # wrong drafts that a request begins with
MARGIN = 1.03  # a step with drafts must be expected to be so much better
COST_A_DRAFT = 0.15  # of a step without, while nothing was measured
_NUM_TIMES = 8  # latest steps of a kind whose median counts …
_MOST_STEPS = 512  # … unless they are further back
_FEWEST_TIMES = 3


class StepTimes:
    """Seconds that steps of one kind took lately."""

    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=_NUM_TIMES)

    def add(self, step: int, seconds: float) -> None:
        self._times.append((step, seconds))

    def seconds(self, step: int) -> float | None:
        """None if too little is known."""
        while self._times and self._times[0][0] < step - _MOST_STEPS:
            self._times.popleft()
        return median(seconds for _, seconds in self._times) if len(self._times) >= _FEWEST_TIMES else None


class Drafting:
    """num_drafts: most a row and step; max_rows: of a step with drafts; max_seats: seats are 1 … max_seats.

    always: every step that can have drafts has them.
    """

    def __init__(
        self, num_drafts: int, max_seats: int, max_rows: int, costs: Sequence[DraftCost] = (), *, always: bool = False
    ) -> None:
        self.num_drafts = num_drafts
        self.max_rows = max_rows
        self._always = always
        self._right = np.zeros(max_seats + 1)
        self._tried = np.zeros(max_seats + 1)
        self._costs = sorted(costs, key=lambda cost: cost.rows)
        self._sizes = [cost.rows for cost in self._costs]
        self._times: dict[tuple[int, bool], StepTimes] = {}
        self._step = 0
        self.num_rounds = 0
        self.num_drafted = 0
        self.accepted_at = np.zeros(num_drafts, np.int64)  # by place in the draft

    def forget(self, seat: int) -> None:
        """Somebody else sits there now."""
        self._right[seat], self._tried[seat] = 0.0, DOUBT

    def wanted(self, seats: np.ndarray, may_draft: np.ndarray) -> int:
        """Drafts for a step of these rows. may_draft: bool, of each of them."""
        rows = len(seats)
        if rows > self.max_rows or not may_draft.any():
            return 0
        if self._always:
            return self.num_drafts
        gain = 1.0 + self._expected(seats[may_draft]) / rows
        return self.num_drafts if gain > MARGIN and gain > MARGIN * self.cost(rows) else 0

    def _expected(self, seats: np.ndarray) -> float:
        """Drafts that will be right, of all the rows: p + p² + … each, were one as likely as the other."""
        right = self._right.take(seats) / self._tried.take(seats)
        return float(sum((right**place).sum() for place in range(1, self.num_drafts + 1)))

    def cost(self, rows: int) -> float:
        """Of a step of so many rows with drafts, in steps without."""
        times = [self._times.get((self._size(rows), drafts)) for drafts in (False, True)]
        plain, drafted = (None if known is None else known.seconds(self._step) for known in times)
        if plain and drafted:
            return drafted / plain
        place = bisect_left(self._sizes, rows)
        if place == len(self._costs):
            return 1.0 + COST_A_DRAFT * self.num_drafts
        found = self._costs[place]
        return found.drafted / found.plain

    def observe(self, rows: int, num_drafts: int, seconds: float) -> None:
        """A step of nothing but so many decode rows took so long."""
        self._step += 1
        self._times.setdefault((self._size(rows), num_drafts > 0), StepTimes()).add(self._step, seconds)

    def _size(self, rows: int) -> int:
        """The rows that such a step is padded to, or about."""
        place = bisect_left(self._sizes, rows)
        return self._sizes[place] if place < len(self._sizes) else 1 << (rows - 1).bit_length()

    def learn(self, seats: np.ndarray, drafted: np.ndarray, matched: np.ndarray, *, verified: bool) -> None:
        """The outcome of a step's drafts: of each row how many there were, and how many were right up to the first
        that was not. verified: the step had them; else it compared the first that there would have been."""
        missed = matched < drafted
        missed |= drafted == 0  # nothing was found to draft: that is no gain either
        self._right[seats] = self._right.take(seats) * MEMORY + matched
        self._tried[seats] = self._tried.take(seats) * MEMORY + matched + missed
        if verified:
            self.num_rounds += int((drafted > 0).sum())
            self.num_drafted += int(drafted.sum())
            reached = np.bincount(matched, minlength=self.num_drafts + 1)
            self.accepted_at += reached[::-1].cumsum()[::-1][1:]
