"""The garbage collector in processes that serve: no long look at what is no garbage in the middle of a step."""

from __future__ import annotations

import gc

_YOUNG = 20_000  # objects more than before, for a look at the new ones; a thousand requests make some 100,000
_MIDDLE = 20  # such looks, for one at those that survived


def settle_heap() -> None:
    """The process is up: what is there now stays and is never looked at again, what comes is looked at more rarely.

    A whole collection over a server's start-up objects and the requests of a burst takes 0.1 s and more, in which no
    stream moves. For processes of our own only: it concerns all of the process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _MIDDLE)
