"""Layers that attend to everything: a request keeps all its blocks, and a hit is a run of them from the first on."""

from __future__ import annotations

from quire.kv.block_pool import Block
from quire.kv.group import BlockNames, Chain
from quire.types.kv import KVGroupSpec


class FullAttention:
    serves_less = True

    def __init__(self, spec: KVGroupSpec, names: BlockNames) -> None:
        self.spec = spec
        self._names = names

    def first_needed(self, num_computed: int) -> int:  # noqa: ARG002
        return 0

    def find(self, chain: Chain, first: int, most: int, step: int) -> list[Block]:
        size = self.spec.block_size
        found = self._names.find(chain, first // size, most // size)
        blocks_a_step = step // size
        return found[: len(found) // blocks_a_step * blocks_a_step] if blocks_a_step > 1 else found
