"""Load: how fast requests that wait get their turn, learned from the steps measured.

Two things make a request wait: seats (or blocks), and prompts before its own. Seats come free at the rate of those
taken over the time that a request keeps one: its steps, which its length makes, times the seconds of a step, which the
device makes and which the latest few tell. Prompts are computed at the rate of the steps that were full of them. So a
forecast is right a few steps after the load has changed, on any device, and knows nothing of models.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from quire.scheduling.request import Request
from quire.types.output import QueueClass, QueueStats
from quire.types.request import BACKGROUND

_NUM_STEPS = 16  # latest steps whose mean time counts
_NUM_FULL = 32  # latest steps full of prompts that count
_NUM_REQUESTS = 64  # latest requests that count


class Mean:
    """The mean of about the `count` latest values; 0 of none."""

    def __init__(self, count: int) -> None:
        self.value = 0.0
        self._count = count
        self._seen = 0

    def add(self, value: float) -> None:
        self._seen = min(self._seen + 1, self._count)
        self.value += (value - self.value) / self._seen


class Load:
    """Told of every step, and of every request that is seated, leaves its seat or begins.

    What it learns of requests, it learns of those that somebody waits for.
    """

    def __init__(self) -> None:
        self.num_begun = 0  # requests that have had a seat, those in the background not counted
        self._num_steps = 0
        self._step_seconds = Mean(_NUM_STEPS)
        self._seat_steps = Mean(_NUM_REQUESTS)  # that a request keeps its seat
        self._prompt = Mean(_NUM_REQUESTS)  # tokens of a prompt
        self._computed = Mean(_NUM_REQUESTS)  # of these, not found in the prefix cache
        self._full: deque[tuple[int, float]] = deque(maxlen=_NUM_FULL)  # (prompt tokens, seconds)

    def observe(self, seconds: float, prompt_tokens: int, *, is_full: bool) -> None:
        """A step is done. is_full: it left prompts behind for which there were seats and blocks."""
        self._num_steps += 1
        self._step_seconds.add(seconds)
        if is_full and prompt_tokens:
            self._full.append((prompt_tokens, seconds))

    def seat(self, request: Request) -> None:
        request.seated_at = self._num_steps

    def unseat(self, request: Request) -> None:
        if request.rank[0] != BACKGROUND:  # which leaves as soon as others come
            self._seat_steps.add(max(1, self._num_steps - request.seated_at))

    def begin(self, request: Request, *, in_background: bool) -> None:
        """Its first seat. The background is not what others are like: its prompts say nothing of theirs."""
        if in_background:
            return
        self.num_begun += 1
        self._prompt.add(request.num_prompt)
        self._computed.add(request.num_prompt - request.num_cached)

    def report(
        self,
        waiting: Mapping[int, tuple[int, int]],
        running: Counter[int],
        prefilling: int,
        free_seats: int,
    ) -> QueueStats:
        """waiting: (requests, prompt tokens), and running: requests, by class; prefilling: prompt tokens that running
        requests lack; free_seats: that a waiting request could take."""
        share = self._computed.value / self._prompt.value if self._prompt.value else 1.0
        classes = []
        for kind in sorted(waiting.keys() | running.keys()):
            requests, tokens = waiting.get(kind, (0, 0))
            classes.append(QueueClass(kind, requests, round(tokens * share), running[kind]))
        turn = self._seat_steps.value * self._step_seconds.value
        seconds = sum(took for _, took in self._full)
        return QueueStats(
            classes=classes,
            prefilling=prefilling,
            free_seats=free_seats,
            seats_per_second=(running.total() + free_seats) / turn if turn else 0.0,
            tokens_per_second=sum(tokens for tokens, _ in self._full) / seconds if seconds else 0.0,
            mean_tokens=self._computed.value,
            num_begun=self.num_begun,
        )


def predict_wait(queue: QueueStats, priority: int, unseen: int = 0) -> float:
    """Seconds until a request of this class that comes now has its turn; 0 as long as nothing is known.

    unseen: requests on their way to the engine of which `queue` does not know.
    """
    ahead, seats = unseen, queue.free_seats
    tokens = queue.prefilling + unseen * queue.mean_tokens
    for each in queue.classes:
        if each.priority <= priority:
            ahead += each.waiting
            tokens += each.tokens
        else:
            seats += each.running  # they yield
    wait = 0.0
    if queue.seats_per_second:
        wait = max(0, ahead + 1 - seats) / queue.seats_per_second
    if queue.tokens_per_second:
        wait = max(wait, tokens / queue.tokens_per_second)
    return wait
