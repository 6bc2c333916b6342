"""What the core shows, asked once for all visitors and only while there are any."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from quire.types.view import EngineView, StepView

if TYPE_CHECKING:
    from quire.frontend.async_engine import AsyncLLM

EVERY = 0.8  # seconds between two looks at least …
SHARE = 1 / 200  # … and as many more as keep them below this share of the core's time
LINGER = 60.0  # seconds after a look in which lives are followed and ended requests kept
KEPT_STEPS = 1024


class Watch:
    """Of one engine. Visitors share a look."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._steps: deque[StepView] = deque(maxlen=KEPT_STEPS)
        self._view: EngineView | None = None
        self._taken = 0.0  # time.monotonic()
        self._num_restarts = 0
        self._lock = asyncio.Lock()

    async def look(self) -> EngineView:
        """The latest. Raises EngineDeadError."""
        async with self._lock:
            view = self._view
            pause = EVERY if view is None else max(EVERY, view.seconds / SHARE)
            if view is None or time.monotonic() - self._taken >= pause:
                view = await self._ask()
            return view

    def steps_after(self, step: int) -> list[StepView]:
        return [each for each in self._steps if each.step > step]

    async def _ask(self) -> EngineView:
        restarts = self._engine.stats().num_restarts
        if restarts != self._num_restarts:  # another engine counts its steps from 0
            self._num_restarts = restarts
            self._steps.clear()
        after = self._steps[-1].step if self._steps else -1
        self._view = view = await self._engine.look(after, LINGER)
        self._taken = time.monotonic()
        self._steps.extend(view.steps)
        return view
