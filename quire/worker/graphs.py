"""CUDA graphs of decode steps: captured once for a ladder of batch sizes, replayed with nothing copied in.

A step is two graphs: the forward pass (gather … logits) and the tail (sample, commit). Between them is the one
place where a feature that only some steps need (penalties, log-probabilities, a grammar's mask) can act.
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


def capture_graph(body: Callable[[], None], stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    """What `body` launches, as a graph. Graphs of one pool share its memory: they must run one after another."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            body()
        finally:
            graph.capture_end()
    return graph


class DecodeGraphs:
    """One captured pair of graphs a size.

    forward(size, layers): everything from gather to logits; tail(size): plain sampling and commit. Before a capture one
    layer runs alone: kernels are compiled and matrix algorithms loaded, which a capture forbids; all layers are alike.
    """

    def __init__(
        self,
        sizes: list[int],
        forward: Callable[[int, int | None], None],
        tail: Callable[[int], None],
        stream: torch.cuda.Stream,
    ) -> None:
        self.sizes = sizes
        self._forward = forward
        self._tail = tail
        self._stream = stream
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
        self._size_of_rows = [0] * ((sizes[-1] if sizes else 0) + 1)
        for size in reversed(sizes):
            for rows in range(size + 1):
                self._size_of_rows[rows] = size

    def capture(self, pool: Any) -> float:
        """Capture all sizes, largest first so that the smaller ones reuse its memory. Returns the seconds it took."""
        began = time.perf_counter()
        gc.collect()
        gc.disable()  # a collection inside a capture could free device memory and break it
        try:
            for size in reversed(self.sizes):
                self._forward(size, 1)
                self._tail(size)
                self._graphs[size] = (
                    capture_graph(partial(self._forward, size, None), self._stream, pool),
                    capture_graph(partial(self._tail, size), self._stream, pool),
                )
        finally:
            gc.enable()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def size_for(self, rows: int) -> int:
        """The smallest captured size that holds `rows`; 0 if none does."""
        return self._size_of_rows[rows] if rows < len(self._size_of_rows) else 0

    def forward(self, size: int) -> None:
        self._graphs[size][0].replay()

    def tail(self, size: int) -> None:
        self._graphs[size][1].replay()
