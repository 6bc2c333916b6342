"""The phases of a start: how long each takes, and a line in the log while one takes long, so that nobody wonders
whether anything happens: a slow disk, or a rank that the others wait for and that never comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from quire.foundation.log import get_logger
from quire.types.ranks import Rank

_log = get_logger(__name__)
PATIENCE = 30.0  # seconds until a phase is told; each further line comes after twice as long

_DOING = {
    "device": "bringing up the device",
    "ranks": "waiting for the other ranks: each must have been started, and reach this one",
    "build": "laying out the model",
    "rehearse": "finding out which kernels there are to compile",
    "weights": "loading weights",
    "compile": "compiling kernels",
    "profile": "measuring what a step takes",
    "kv_cache": "making the KV cache",
    "graphs": "capturing CUDA graphs",
}


class Phases:
    """seconds: of those that are over, by name."""

    def __init__(self, rank: Rank) -> None:
        self._who = f"rank {rank.index} of {rank.size}: " if rank.size > 1 else ""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """The phase of that name is this block, if it ends well."""
        began, over = time.perf_counter(), threading.Event()
        threading.Thread(target=self._tell, args=(name, over), name="quire-patience", daemon=True).start()
        try:
            yield
            self.seconds[name] = time.perf_counter() - began
        finally:
            over.set()

    def _tell(self, name: str, over: threading.Event) -> None:
        began, patience = time.perf_counter(), PATIENCE
        while not over.wait(patience):
            _log.warning("%sstill %s, for %.0f s", self._who, _DOING[name], time.perf_counter() - began)
            patience *= 2
