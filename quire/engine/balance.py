"""Which of several cores a request goes to.

A core costs a request what stands before it there and what it would have to compute of its prompt: both in prompt
tokens, so that a cached prefix is worth just the tokens that it saves. Each front end decides by itself, from what it
has sent and what the cores report a few times a second.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from quire.engine.messages import EngineInfo
from quire.scheduling.affinity import Affinity, chain
from quire.scheduling.load import predict_wait
from quire.types.kv import capacity
from quire.types.output import EngineStats, QueueStats
from quire.types.request import BACKGROUND, EngineRequest

CHUNK, MOST_CHUNKS = 32, 1024  # tokens whose prefix is told from another, and how often in a prompt
MAX_CHUNKS_KEPT = 1 << 17
ANSWER_TOKENS = 64  # that an answer being written weighs: it slows every step a little
USUAL_SPEED = 8192.0  # prompt tokens a second, until a core has measured its own
_INT32 = 4  # bytes
_ENDS = range(CHUNK * _INT32, MOST_CHUNKS * CHUNK * _INT32 + 1, CHUNK * _INT32)


@dataclass(slots=True)
class Sent:
    """A request that has not ended. tokens: of its prompt that its core has to compute; 0 once it has begun."""

    core: int
    tokens: int
    is_background: bool


@dataclass(slots=True)
class CoreLoad:
    """What is known of a core: what went there from here, and what others have there by its latest report."""

    running: int = 0  # requests of ours …
    background: int = 0  # … and those among them that nobody waits for
    tokens: int = 0  # of our prompts that have not begun
    unseen: deque[float] = field(default_factory=deque)  # when those of ours were sent that its report did not see
    others_running: int = 0
    others_background: int = 0
    others_tokens: int = 0
    free_tokens: int | None = None  # of its KV cache; None: nobody knows
    queue: QueueStats = field(default_factory=QueueStats)

    def report(self, stats: EngineStats, block_tokens: float) -> None:
        queue = self.queue = stats.queue or QueueStats()
        behind = sum(each.waiting + each.running for each in queue.classes if each.priority == BACKGROUND)
        present = sum(each.waiting + each.running for each in queue.classes)
        waiting = queue.prefilling + sum(each.tokens for each in queue.classes)
        self.others_running = max(0, present - self.running)
        self.others_background = max(0, behind - self.background)
        self.others_tokens = max(0, waiting - self.tokens)
        self.free_tokens = int(stats.num_free_blocks * block_tokens) if stats.num_blocks else None
        while self.unseen and self.unseen[0] < queue.as_of:
            self.unseen.popleft()

    def cost(self, tokens: int, new: int, request: EngineRequest) -> float:
        """Of a request of so many prompt `tokens`, `new` ones among them. In prompt tokens."""
        answers, before = self.running + self.others_running, float(self.tokens + self.others_tokens)
        if request.priority != BACKGROUND:
            answers -= self.background + self.others_background  # they yield
        wait = predict_wait(self.queue, request.priority, len(self.unseen))
        before = max(before, wait * (self.queue.tokens_per_second or USUAL_SPEED))
        lacking = 0 if self.free_tokens is None else max(0, tokens - max(0, self.free_tokens - self.tokens))
        return before + new + ANSWER_TOKENS * answers + lacking


class Balancer:
    """Of `count` cores. Not for two threads at once."""

    def __init__(self, count: int, info: EngineInfo) -> None:
        blocks = max(1, info.report.num_blocks - 1)
        self._block_tokens = capacity(info.report.groups, blocks + 1) / blocks
        kept = int(count * blocks * self._block_tokens) // CHUNK
        self._affinity: Affinity[int] = Affinity(max(1, min(kept, MAX_CHUNKS_KEPT)))
        self._loads = [CoreLoad() for _ in range(count)]
        self._sent: dict[str, Sent] = {}
        self._turn = random.randrange(count)  # of several front ends not all begin with the same core

    def choose(self, request: EngineRequest, cores: Collection[int]) -> int:
        """The core, of those in `cores`, that the request is best sent to; it is counted there from now on."""
        hashes = [] if request.prompt_embeds is not None else self._hashes(request)
        cached = self._affinity.find(hashes)
        num_tokens = len(request.token_ids) + len(request.given)
        self._turn += 1

        def cost(core: int) -> tuple[float, int]:
            new = num_tokens - min(cached.get(core, 0) * CHUNK, num_tokens - 1)
            return self._loads[core].cost(num_tokens, new, request), (core - self._turn) % len(self._loads)

        core = min(cores, key=cost)
        new = num_tokens - min(cached.get(core, 0) * CHUNK, num_tokens - 1)
        self._count(request, core, new)
        self._affinity.note(hashes, core)
        return core

    def _hashes(self, request: EngineRequest) -> list[int]:
        adapter = None if request.lora is None else request.lora.key
        return chain(request.token_ids.tobytes(), _ENDS, (adapter, request.cache_salt))

    def _count(self, request: EngineRequest, core: int, tokens: int) -> None:
        sent = self._sent[request.id] = Sent(core, tokens, request.priority == BACKGROUND)
        load = self._loads[core]
        load.running += 1
        load.background += sent.is_background
        load.tokens += tokens
        load.unseen.append(time.monotonic())

    def core_of(self, request_id: str) -> int | None:
        """Where an unfinished request is; None: nobody knows it."""
        sent = self._sent.get(request_id)
        return None if sent is None else sent.core

    def of_core(self, core: int) -> frozenset[str]:
        """The requests that it has not finished."""
        return frozenset(request_id for request_id, sent in self._sent.items() if sent.core == core)

    def begin(self, request_id: str) -> None:
        """There is news of it: its prompt is computed."""
        if (sent := self._sent.get(request_id)) is not None and sent.tokens:
            self._loads[sent.core].tokens -= sent.tokens
            sent.tokens = 0

    def end(self, request_ids: Iterable[str]) -> None:
        """They have ended. Unknown ids are ignored."""
        for request_id in request_ids:
            self.begin(request_id)
            if (sent := self._sent.pop(request_id, None)) is not None:
                self._loads[sent.core].running -= 1
                self._loads[sent.core].background -= sent.is_background

    def report(self, core: int, stats: EngineStats) -> None:
        """The core's latest."""
        self._loads[core].report(stats, self._block_tokens)

    def queue_of(self, core: int) -> QueueStats:
        """As it was reported. One that has all been seen is up to date, however long the core has been silent."""
        load = self._loads[core]
        return load.queue if load.unseen else msgspec.structs.replace(load.queue, as_of=time.monotonic())

    def bury(self, core: int) -> frozenset[str]:
        """The core is dead. Returns the requests that it had, of which no more is known here."""
        lost = self.of_core(core)
        self.end(lost)
        self._loads[core] = CoreLoad()
        self._affinity.forget(core)
        return lost

    def reset(self) -> None:
        """The caches are empty."""
        for core in range(len(self._loads)):
            self._affinity.forget(core)
