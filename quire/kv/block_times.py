"""How long blocks live, and lie idle before somebody needs the room (`kv_cache_metrics`): of some, drawn by lot."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import Protocol


class Block(Protocol):
    """What must be known of one."""

    id: int
    key: bytes | None


class BlockTimes:
    """share: of the blocks that are followed, 0 … 1. Lists are seconds since they were last taken."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic, seed: int = 0) -> None:
        self._share = share
        self._clock = clock
        self._draw = random.Random(seed).random
        self._known: dict[int, list[float]] = {}  # id → [when it was taken, when it was last used]
        self.lifetimes: list[float] = []  # from when a block was taken until what it held was forgotten
        self.idles: list[float] = []  # before that, since it was last used
        self.gaps: list[float] = []  # between two uses

    def taken(self, blocks: Iterable[Block]) -> None:
        """New owners write to them: what they held is forgotten."""
        now = self._clock()
        for block in blocks:
            known = self._known.pop(block.id, None)
            if known is not None:
                self.lifetimes.append(now - known[0])
                self.idles.append(now - known[1])
            if self._draw() < self._share:
                self._known[block.id] = [now, now]

    def used(self, blocks: Iterable[Block]) -> None:
        """Somebody found them by what they hold."""
        now = self._clock()
        for block in blocks:
            if (known := self._known.get(block.id)) is not None:
                self.gaps.append(now - known[1])
                known[1] = now

    def freed(self, block: Block) -> None:
        """Nobody holds it any more. One that nobody can find is as good as forgotten, and none that was evicted."""
        if block.key is None:
            self._known.pop(block.id, None)
        elif (known := self._known.get(block.id)) is not None:
            known[1] = self._clock()

    def take(self) -> tuple[list[float], list[float], list[float]]:
        """Lifetimes, idle times and gaps since the last time."""
        found = self.lifetimes, self.idles, self.gaps
        self.lifetimes, self.idles, self.gaps = [], [], []
        return found
