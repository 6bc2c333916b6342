"""The muscle's front room: this file is run before anything of the muscle imports torch, and imports it itself."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

# How long OpenMP's threads wait for each other in a busy loop, in turns of about 40 ns. Its default, milliseconds, is
# longer than the scheduler's patience: with one core taken by another process a CPU step takes ten times as long. This
# value bridges the gaps between the operations of a step, and nothing is lost on an idle machine.
_SPINS = "GOMP_SPINCOUNT", "3000"


def _import_torch() -> None:
    """OpenMP looks at the environment once, when torch loads it: so it is the user's own again afterwards. In a thread,
    as importing torch leaves rings of frames behind, which would hold all that this stack of calls holds."""
    name, value = _SPINS
    is_ours = name not in os.environ
    os.environ.setdefault(name, value)
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(import_module, "torch").result()
    finally:
        if is_ours:
            del os.environ[name]


_import_torch()
