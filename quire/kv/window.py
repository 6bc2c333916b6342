"""Layers that attend to the last `window` tokens: what lies behind is given back while the request runs.

A hit needs nothing but the blocks that its first token sees. A freed block that was offered to the cache stays in it
until its page is needed: prompts that share a beginning longer than the window find its last stretch there.
"""

from __future__ import annotations

from quire.kv.block_pool import Block
from quire.kv.group import BlockNames, Chain
from quire.types.kv import KVGroupSpec


class SlidingWindow:
    serves_less = False

    def __init__(self, spec: KVGroupSpec, names: BlockNames) -> None:
        self.spec = spec
        self._names = names

    def first_needed(self, num_computed: int) -> int:
        # The token at `num_computed` is the last that it sees itself.
        return max(0, num_computed - self.spec.window + 1) // self.spec.block_size

    def find(self, chain: Chain, first: int, most: int, step: int) -> list[Block]:
        size = self.spec.block_size
        start, end, blocks_a_step = first // size, most // size, step // size
        while end > start:
            seen = max(start, self.first_needed(end * size))
            found = self._names.find_backwards(chain, seen, end)
            if len(found) == end - seen:
                return [self._names.null] * (seen - start) + found[::-1]
            missing = end - 1 - len(found)  # every hit between it and `end` would see it too
            end = missing // blocks_a_step * blocks_a_step
        return []
