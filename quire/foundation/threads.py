"""How soon one thread gets the interpreter from another."""

from __future__ import annotations

import sys

_SECONDS = 1e-4


def switch_soon() -> None:
    """For processes of our own whose loop must not wait long for threads that work beside it in Python.

    Python lets a thread keep the interpreter for 5 ms while others wait, and a loop needs it anew after every system
    call. Where no two threads want it this costs nothing.
    """
    sys.setswitchinterval(_SECONDS)
