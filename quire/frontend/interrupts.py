"""Ctrl-C in a process whose engine runs in the thread that asks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPT_SECONDS = 1.0  # longest wait for outputs before Ctrl-C is looked at


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of the step; the function yielded tells whether it was pressed. Twice: at once.

    The engine runs in this thread, and an exception in the middle of a step would leave it in pieces.
    """
    pressed: list[int] = []
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            signal.default_int_handler(number, frame)
        pressed.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
