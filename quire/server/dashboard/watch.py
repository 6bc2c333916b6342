"""What the cores show, asked once for all visitors and only while there are any."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from quire.types.view import EngineView, StepView

if TYPE_CHECKING:
    from quire.frontend.async_engine import AsyncLLM

EVERY = 0.8  # seconds between two looks at least …
SHARE = 1 / 200  # … and as many more as keep them below this share of a core's time
LINGER = 60.0  # seconds after a look in which lives are followed and ended requests kept
KEPT_STEPS = 1024


class Watch:
    """Of one engine, be it one core or several. Visitors share a look."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._steps: dict[int, deque[StepView]] = {}  # by core
        self._views: list[EngineView] = []
        self._taken = 0.0  # time.monotonic()
        self._lock = asyncio.Lock()

    async def look(self) -> list[EngineView]:
        """The latest of each core that runs; while none does, what was seen last. Raises EngineDeadError."""
        async with self._lock:
            pause = max([EVERY, *(view.seconds / SHARE for view in self._views)])
            if self._engine.outage is None and (not self._views or time.monotonic() - self._taken >= pause):
                await self._ask()
            return self._views

    @property
    def until(self) -> float:
        """time.time(); all steps that ended before have been seen."""
        return min((view.now for view in self._views), default=0.0)

    def steps_after(self, core: int, moment: float) -> list[StepView]:
        """Those that ended later than `moment`, time.time()."""
        return [step for step in self._steps.get(core, ()) if step.ended > moment]

    async def _ask(self) -> None:
        self._views = await self._engine.look(self.until, LINGER)
        self._taken = time.monotonic()
        for view in self._views:
            kept = self._steps.setdefault(view.engine, deque(maxlen=KEPT_STEPS))
            last = kept[-1].ended if kept else 0.0
            kept.extend(step for step in view.steps if step.ended > last)
