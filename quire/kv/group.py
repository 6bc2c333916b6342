"""What a kind of layers asks of its blocks. One file a kind; the manager treats all alike.

A kind answers four questions: how many bytes a token has and how many blocks a request must be able to hold (its spec,
which the worker counts with too), which blocks nobody reads any more, and what a hit of the prefix cache needs.
Entries of a block table that hold nothing (any more) are the null block.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from quire.kv.block_pool import Block, BlockPool
from quire.types.kv import KVGroupSpec

Chain = list[bytes]  # hashes of a request's leading stretches of `unit` tokens, each of all tokens up to there


class KVGroup(Protocol):
    """Layers with one block table a request. A hit that others can serve is no matter for it."""

    spec: KVGroupSpec

    def __init__(self, spec: KVGroupSpec, names: BlockNames) -> None: ...

    def first_needed(self, num_computed: int) -> int:
        """The first entry of the table that a token from `num_computed` on reads: those before it may be freed."""
        ...


@runtime_checkable
class CachedGroup(KVGroup, Protocol):
    """A group whose full blocks can be found again, and that a hit depends on."""

    serves_less: bool  # where it can serve a hit, it can serve every shorter one

    def find(self, chain: Chain, first: int, most: int, step: int) -> list[Block]:
        """Table entries from token `first` on, for the longest hit up to token `most` that this group can serve.

        The request itself holds what it needs of the tokens before `first`. Both are multiples of `step`, and so is the
        token at which the entries end; `step` is one of the block size. The list is empty for no hit.
        """
        ...


class BlockNames:
    """What the blocks of group number `index` are known by in the pool, which groups share.

    unit: tokens that each link of a chain stands for; block_size: a multiple of it.
    """

    def __init__(self, pool: BlockPool, index: int, block_size: int, unit: int) -> None:
        self.null = pool.null
        self._pool = pool
        self._suffix = index.to_bytes(1, "big") if index else b""
        self._links = block_size // unit  # a block

    def find(self, chain: Chain, first: int, last: int) -> list[Block]:
        """Those of entries first … last - 1 of a table, up to the first that is not there."""
        return self._pool.find(self._names(chain, first, last))

    def find_backwards(self, chain: Chain, first: int, last: int) -> list[Block]:
        """Those of entries last - 1 … first, up to the first that is not there."""
        return self._pool.find(reversed(self._names(chain, first, last)))

    def register(self, block: Block, chain: Chain, index: int) -> None:
        """Let entry `index` of a table be found again; the chain reaches to its end at least."""
        self._pool.register(block, chain[(index + 1) * self._links - 1] + self._suffix)

    def _names(self, chain: Chain, first: int, last: int) -> list[bytes]:
        links = self._links
        names = chain[(first + 1) * links - 1 : last * links : links]
        return [name + self._suffix for name in names] if self._suffix else names
