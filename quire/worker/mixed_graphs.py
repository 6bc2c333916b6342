"""CUDA graphs of small steps with prompt chunks: the same padded layout every time, so that launching costs nothing.

A size holds up to `decodes` decode rows and MAX_PROMPTS prompt chunks, `tokens` tokens in all. The plan's rows lie in
one piece: padding decode rows stand before them, empty rows behind.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quire.types.plan import StepPlan
from quire.worker.graphs import capture_graph

MAX_PROMPTS = 16  # prompt chunks in one step
# Weights times tokens of the largest step that is captured: beyond, the device takes much longer than the host's
# launches (25 against 10 to 20 ms on an H200), and running ahead hides them.
MAX_WORK = 8.5e12


@dataclass(frozen=True, slots=True)
class MixedSize:
    """What a graph has room for."""

    decodes: int
    tokens: int  # those of decode rows included

    @property
    def rows(self) -> int:
        return self.decodes + MAX_PROMPTS


def mixed_sizes(max_rows: int, max_tokens: int, num_weights: int) -> list[MixedSize]:
    """Sizes to capture, falling. Decode rows and prompts together make round numbers of rows.

    max_rows, max_tokens: of any step; num_weights: elements of the model.
    """
    decodes = [count for count in (0, 16, 48, 112, 240, 496) if 4 * count < 3 * max_rows]
    if max_rows <= 512:
        decodes.append(max_rows)
    top = min(2 * max_tokens, int(MAX_WORK / num_weights))  # one size has room for a full step and its padding
    sizes = [
        MixedSize(count, tokens)
        for count in decodes
        for tokens in (128, 256, 384, 512, 768, 1024, 1536, 2048)
        if 2 * count <= tokens <= top
    ]
    return sorted(sizes, key=lambda size: (size.tokens, size.decodes), reverse=True)


class MixedGraphs:
    """One graph a size from gather to the logits of the rows that sample, and one a number of rows to sample them.

    forward(size, layers) and tail(size) are what is captured; the tail looks at nothing of a size but its rows.
    """

    def __init__(
        self,
        sizes: list[MixedSize],
        forward: Callable[[MixedSize, int | None], None],
        tail: Callable[[MixedSize], None],
        stream: torch.cuda.Stream,
    ) -> None:
        self.sizes = sizes
        self._forward = forward
        self._tail = tail
        self._stream = stream
        self._forwards: dict[MixedSize, torch.cuda.CUDAGraph] = {}
        self._tails: dict[int, torch.cuda.CUDAGraph] = {}
        self._rising = sorted(sizes, key=lambda size: (size.tokens, size.decodes))

    def capture(self, pool: Any) -> float:
        """Capture all sizes, largest first so that the smaller ones reuse its memory. Returns the seconds it took."""
        began = time.perf_counter()
        gc.disable()  # a collection inside a capture could free device memory and break it
        try:
            for size in self.sizes:
                self._forward(size, 1)  # warm up, see `DecodeGraphs`
                self._forwards[size] = capture_graph(partial(self._forward, size, None), self._stream, pool)
                if size.decodes not in self._tails:
                    self._tail(size)
                    self._tails[size.decodes] = capture_graph(partial(self._tail, size), self._stream, pool)
        finally:
            gc.enable()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def size_for(self, plan: StepPlan) -> MixedSize | None:
        """The smallest size that holds the step; None if none does, or if the step wants more than tokens."""
        decodes, prompt_tokens = plan.num_decodes, len(plan.token_ids)
        if plan.attachments or plan.num_rows - decodes > MAX_PROMPTS:
            return None
        for size in self._rising:
            if size.decodes >= decodes and size.tokens - size.decodes >= prompt_tokens:
                return size
        return None

    def forward(self, size: MixedSize) -> None:
        self._forwards[size].replay()

    def tail(self, size: MixedSize) -> None:
        self._tails[size.decodes].replay()
