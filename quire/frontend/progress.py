"""The progress line of offline generation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

OTHER_COLUMNS = 72  # characters of what stands beside the bar, so that a usual terminal shows all of it
ProgressFactory = Callable[..., Any]  # tqdm.tqdm or a look-alike: total=, desc=; update(n), postfix, close()


class PromptProgress:
    """ "Processed prompts" with the speed so far. `show` may be a tqdm-like factory; False shows nothing."""

    def __init__(self, total: int, show: bool | ProgressFactory, description: str = "Processed prompts") -> None:
        self._started = time.monotonic()
        self._num_input = self._num_output = 0
        self._bar: Progress | None = None
        self._foreign: Any = None
        if callable(show):
            self._foreign = show(total=total, desc=description)
        elif show:
            self._bar = _bar()
            self._task = self._bar.add_task(description, total=total, speed="")

    def __enter__(self) -> PromptProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._foreign is not None:
            self._foreign.close()

    def done(self, num_input: int, num_output: int) -> None:
        """One more prompt is finished; its tokens count towards the speed."""
        self._num_input += num_input
        self._num_output += num_output
        seconds = max(time.monotonic() - self._started, 1e-9)
        read, made = self._num_input / seconds, self._num_output / seconds
        if self._bar is not None:
            self._bar.update(self._task, advance=1, speed=f"{read:,.0f} in, {made:,.0f} out tok/s")
        if self._foreign is not None:
            self._foreign.postfix = f"est. speed input: {read:.2f} tok/s, output: {made:.2f} tok/s"
            self._foreign.update(1)


def _bar() -> Progress:
    from rich.console import Console  # 50 modules, for who wants to see it
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(file=sys.stderr)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(max(4, min(40, console.width - OTHER_COLUMNS))),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
        console=console,
    )
