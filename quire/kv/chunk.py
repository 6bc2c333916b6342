"""Layers that attend to their own chunk of `window` tokens: those of earlier chunks are given back."""

from __future__ import annotations

from quire.kv.window import SlidingWindow


class Chunk(SlidingWindow):
    """A window that stands still until a chunk is full: hits and frees differ in where it begins, nothing else."""

    def first_needed(self, num_computed: int) -> int:
        return num_computed // self.spec.window * self.spec.window // self.spec.block_size
