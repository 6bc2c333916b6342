"""CUDA graphs of decode steps: captured once for a ladder of batch sizes, replayed with nothing copied in.

A step is two graphs: the forward pass (gather … logits) and a tail (sample, commit), of which there are two: with and
without top-k, top-p and min-p. Between them is the one place where a feature that only some steps need (penalties,
log-probabilities, a grammar's mask) can act.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

MAX_GRAPH_SIZE = 512


def graph_sizes(max_rows: int, wanted: list[int]) -> list[int]:
    """Batch sizes to capture, rising. Steps grow with the size, so that padding wastes at most about an eighth."""
    if wanted:
        return sorted({size for size in wanted if 0 < size <= max_rows})
    top = min(max_rows, MAX_GRAPH_SIZE)
    sizes = {1, 2, 4, top}
    size, step = 8, 8
    while size < top:
        sizes.add(size)
        step = 8 if size < 64 else 16 if size < 128 else 32 if size < 256 else 64
        size += step
    return sorted(size for size in sizes if size <= top)


class DecodeGraphs:
    """A captured forward pass and two tails a size.

    forward(size): everything from gather to logits; tail(size, filtered): sampling and commit.
    """

    def __init__(
        self,
        sizes: list[int],
        forward: Callable[[int], None],
        tail: Callable[[int, bool], None],
        stream: torch.cuda.Stream,
    ) -> None:
        self.sizes = sizes
        self._forward = forward
        self._tail = tail
        self._stream = stream
        self._forwards: dict[int, torch.cuda.CUDAGraph] = {}
        self._tails: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._size_of_rows = [0] * ((sizes[-1] if sizes else 0) + 1)
        for size in reversed(sizes):
            for rows in range(size + 1):
                self._size_of_rows[rows] = size

    def capture(self) -> float:
        """Capture all sizes, largest first so that the smaller ones reuse its memory. Returns the seconds it took."""
        began = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        gc.collect()
        gc.disable()  # a collection inside a capture could free device memory and break it
        try:
            for size in reversed(self.sizes):
                self.run(size)  # warm up: compile kernels, choose matrix algorithms
                self._forwards[size] = self._capture(partial(self._forward, size), pool)
                for filtered in (False, True):
                    self._tails[size, filtered] = self._capture(partial(self._tail, size, filtered), pool)
        finally:
            gc.enable()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def rehearse(self) -> None:
        """Launch, outside of graphs, every kernel variant that they will hold: these depend on a size's magnitude."""
        for size in self.sizes:
            if size.bit_count() == 1 or size == self.sizes[-1]:
                self.run(size)

    def run(self, size: int) -> None:
        """What the graphs of a size do."""
        self._forward(size)
        for filtered in (False, True):
            self._tail(size, filtered)

    def _capture(self, body: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        return graph

    def size_for(self, rows: int) -> int:
        """The smallest captured size that holds `rows`; 0 if none does."""
        return self._size_of_rows[rows] if rows < len(self._size_of_rows) else 0

    def forward(self, size: int) -> None:
        self._forwards[size].replay()

    def tail(self, size: int, *, filtered: bool) -> None:
        self._tails[size, filtered].replay()
