"""What a kind of attention asks of its blocks. One class a kind; the manager treats all alike."""

from __future__ import annotations

from typing import Protocol

from quire.foundation.errors import ConfigError
from quire.kv.block_pool import Block, BlockPool
from quire.types.kv import KVGroupSpec


class KVGroup(Protocol):
    """Layers with one block table a request."""

    spec: KVGroupSpec

    def num_blocks(self, num_tokens: int) -> int:
        """Length of the block table of a request whose first `num_tokens` tokens have KV."""
        ...

    def find_cached(self, hashes: list[bytes], first: int, last: int) -> list[Block]:
        """Cached blocks for table entries first, first + 1, … (at most up to `last`, exclusive)."""
        ...

    def register(self, block: Block, content: bytes) -> None:
        """Let `block` be found again by the hash of its content."""
        ...


class FullAttention:
    """Every token attends to all before it: a request holds all its blocks, and a hit is a run from the first on."""

    def __init__(self, spec: KVGroupSpec, index: int, pool: BlockPool) -> None:
        self.spec = spec
        self._pool = pool
        # Groups share the pool, not the content.
        self._suffix = index.to_bytes(1, "big") if index else b""

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)

    def find_cached(self, hashes: list[bytes], first: int, last: int) -> list[Block]:
        wanted = hashes[first:last]
        return self._pool.find(map(self._key, wanted) if self._suffix else wanted)

    def register(self, block: Block, content: bytes) -> None:
        self._pool.register(block, self._key(content))

    def _key(self, content: bytes) -> bytes:
        return content + self._suffix


# Of "none" a request holds one block as long as its longest prompt, without a byte behind it.
KINDS: dict[str, type[FullAttention]] = {"full": FullAttention, "none": FullAttention}


def make_group(spec: KVGroupSpec, index: int, pool: BlockPool) -> KVGroup:
    """The group for `spec`. Raises ConfigError for a kind that no class serves."""
    if spec.kind not in KINDS:
        raise ConfigError(f"KV group {index} is of kind {spec.kind!r}; known kinds: {', '.join(KINDS)}")
    return KINDS[spec.kind](spec, index, pool)
