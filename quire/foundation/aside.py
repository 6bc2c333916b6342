"""What takes long is done on a thread, so that an event loop's streams go on. What is long is said here, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

LONG = 16 * 1024  # bytes, characters, ids or numbers; what is no longer costs less than a thread would
MANY = 1024  # objects that Python makes or walks through one by one
T = TypeVar("T")


async def aside(call: Callable[[], T], size: int, most: int = LONG) -> T:
    """`call()`, on a thread if `size` is more than `most`."""
    return await asyncio.to_thread(call) if size > most else call()
