"""The garbage collector, kept from long looks at what is no garbage while somebody waits."""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_YOUNG = 20_000  # objects more than before, for a look at the new ones; a thousand requests make some 100,000
_MIDDLE = 20  # such looks, for one at those that survived


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """For what a process of our own imports as it starts: no collection looks at what there is, now or later.

    Torch makes 160,000 objects. To look for garbage among them, while they come and four times until a core is up, took
    a seventh of its start's processor time on a CPU.
    """
    with no_collection():
        yield
        gc.freeze()
    atexit.register(gc.unfreeze)


def settle_heap() -> None:
    """The process is up: what is there now stays and is never looked at again, what comes is looked at more rarely.

    A whole collection over a server's start-up objects and the requests of a burst takes 0.1 s and more, in which no
    stream moves. For processes of our own only: it concerns all of the process. At its end it all is garbage again:
    libraries that look for leaks then (Triton's) would report every object of theirs.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.set_threshold(_YOUNG, _MIDDLE, _MIDDLE)


class _Change:
    """Of the process's collector, from when the first thread wants it to when none does any more."""

    def __init__(self, make: Callable[[], Callable[[], None]]) -> None:
        """make: changes it, and gives what undoes that."""
        self._make = make
        self._lock = threading.Lock()
        self._num_inside = 0
        self._undo: Callable[[], None] = lambda: None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._num_inside == 0:
                self._undo = self._make()
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if self._num_inside == 0:
                    self._undo()


def _look_rarely() -> Callable[[], None]:
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, 100 * old)
    return lambda: gc.set_threshold(young, middle, old)


def _do_not_look() -> Callable[[], None]:
    was_enabled = gc.isenabled()
    gc.disable()
    return gc.enable if was_enabled else lambda: None


few_whole_collections = _Change(_look_rarely)
"""While an engine runs in a user's own process: what is old is looked at a hundred times more rarely.

Such a look takes 0.1 s beside a model library's objects, in which no step is planned. A step leaves no cycles.
"""

no_collection = _Change(_do_not_look)
"""For making many objects that stay: no collection looks at them meanwhile."""
