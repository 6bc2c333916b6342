"""KVManager: the block tables of all requests that hold blocks, and the prefix cache over them.

A full block of known tokens is registered as soon as the step that fills it is planned. That is safe: all steps run on
one stream, and within a step every layer writes the KV of the whole batch before it reads any. So a request may hit
blocks that a neighbour in the very same plan computes. Blocks of sampled tokens are registered when their request
ends or is preempted: nobody knows these tokens sooner, and hashing many blocks at once is cheaper.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from quire.foundation.errors import ConfigError
from quire.kv.block_pool import Block, BlockPool
from quire.kv.group import make_group
from quire.kv.hashing import RecentChains, chain_start, extend_hashes, new_root
from quire.types.kv import KVGroupSpec

Hit = list[list[Block]]  # cached blocks, one list a group


class TokenOwner(Protocol):
    """What the manager must know of a request."""

    id: str
    tokens: array[int]  # int32, known ones only
    hashes: list[bytes]  # of its full blocks, grown here
    extra_key: bytes  # what besides tokens names its KV


class _Held:
    __slots__ = ("num_registered", "tables")

    def __init__(self, tables: list[list[Block]]) -> None:
        self.tables = tables  # one a group
        self.num_registered = len(tables[0])  # leading blocks that were offered to the cache


class KVManager:
    """num_blocks: blocks of the pool that all groups share, the null block included.

    Raises ConfigError for groups it cannot serve.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVGroupSpec],
        *,
        enable_prefix_caching: bool = True,
        seed: bytes | None = None,
    ) -> None:
        sizes = {spec.block_size for spec in groups}
        if len(sizes) != 1:
            raise ConfigError(f"KV groups must have one block size, got {sorted(sizes) or 'no group'}", "block_size")
        self.block_size = sizes.pop()
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.groups = [make_group(spec, i, self.pool) for i, spec in enumerate(groups)]
        self._root = new_root(seed)
        self._recent = RecentChains(self.block_size)
        self._held: dict[str, _Held] = {}

    @property
    def capacity(self) -> int:
        """Tokens that one request can hold when it is alone."""
        return self.pool.num_usable // len(self.groups) * self.block_size

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 … 1."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def find_cached(self, request: TokenOwner, max_tokens: int) -> tuple[Hit, int]:
        """The cached beginning of `request`: its blocks and how many tokens they cover, at most `max_tokens`."""
        return self._find(request, 0, max_tokens)

    def find_more(self, request: TokenOwner, num_computed: int, max_tokens: int) -> tuple[Hit, int]:
        """Cached blocks that continue the table of a running request which stands at a block's end."""
        if num_computed % self.block_size:
            return [[] for _ in self.groups], 0
        return self._find(request, num_computed // self.block_size, max_tokens)

    def _find(self, request: TokenOwner, first: int, max_tokens: int) -> tuple[Hit, int]:
        last = max_tokens // self.block_size if self.enable_prefix_caching else 0
        if last <= first:
            return [[] for _ in self.groups], 0
        self._extend_hashes(request, last)
        hit = [group.find_cached(request.hashes, first, last) for group in self.groups]
        shortest = min(len(blocks) for blocks in hit)
        return [blocks[:shortest] for blocks in hit], shortest * self.block_size

    def num_needed(self, num_tokens: int, hit: Hit) -> int:
        """Free blocks that a new table for `num_tokens` tokens takes, those of `hit` that are free now included."""
        needed = 0
        for group, blocks in zip(self.groups, hit, strict=True):
            needed += group.num_blocks(num_tokens) - len(blocks) + sum(block.refs == 0 for block in blocks)
        return needed

    def num_missing(self, request: TokenOwner, num_tokens: int) -> int:
        """Blocks that the table of a running request lacks for `num_tokens` tokens."""
        tables = self._held[request.id].tables
        return sum(
            max(0, group.num_blocks(num_tokens) - len(table)) for group, table in zip(self.groups, tables, strict=True)
        )

    def num_held(self, request: TokenOwner) -> int:
        return sum(len(table) for table in self._held[request.id].tables)

    def admit(self, request: TokenOwner, hit: Hit) -> None:
        """Open the table of a request with the blocks found by `find_cached`."""
        for blocks in hit:
            self.pool.touch(blocks)
        self._held[request.id] = _Held([list(blocks) for blocks in hit])

    def adopt(self, request: TokenOwner, hit: Hit) -> None:
        """Append the blocks found by `find_more`."""
        held = self._held[request.id]
        for table, blocks in zip(held.tables, hit, strict=True):
            self.pool.touch(blocks)
            table.extend(blocks)
        held.num_registered = len(held.tables[0])

    def allocate(self, request: TokenOwner, num_tokens: int) -> list[list[Block]] | None:
        """Grow the table to hold `num_tokens` tokens. Returns the new blocks a group, None if too few are free."""
        tables = self._held[request.id].tables
        counts = [
            max(0, group.num_blocks(num_tokens) - len(table)) for group, table in zip(self.groups, tables, strict=True)
        ]
        if sum(counts) > self.pool.num_free:
            return None
        new = [self.pool.allocate(count) for count in counts]
        for table, blocks in zip(tables, new, strict=True):
            table.extend(blocks)
        return new

    def trim(self, request: TokenOwner, num_tokens: int) -> None:
        """Give back the blocks behind those that `num_tokens` tokens need; none of them was registered."""
        for group, table in zip(self.groups, self._held[request.id].tables, strict=True):
            kept = group.num_blocks(num_tokens)
            self.pool.free(reversed(table[kept:]))
            del table[kept:]

    def allocate_one_each(self, requests: Sequence[TokenOwner]) -> list[list[Block]]:
        """One more block in every group for every request: new blocks a group, in the order of `requests`.

        Raises ValueError if too few are free.
        """
        new = []
        for index in range(len(self.groups)):
            blocks = self.pool.allocate(len(requests))
            for request, block in zip(requests, blocks, strict=True):
                self._held[request.id].tables[index].append(block)
            new.append(blocks)
        return new

    def table(self, request: TokenOwner) -> list[list[Block]]:
        """The blocks of a request, a list a group. Not to be changed."""
        return self._held[request.id].tables

    def register(self, request: TokenOwner, num_tokens: int) -> None:
        """Offer to the cache all full blocks among the first `num_tokens` tokens (all known, KV planned)."""
        held = self._held[request.id]
        full = num_tokens // self.block_size
        if full <= held.num_registered or not self.enable_prefix_caching:
            return
        self._extend_hashes(request, full)
        for group, table in zip(self.groups, held.tables, strict=True):
            for i in range(held.num_registered, full):
                group.register(table[i], request.hashes[i])
        held.num_registered = full

    def free(self, request: TokenOwner) -> None:
        """Close the table of a request."""
        for table in self._held.pop(request.id).tables:
            # The end of a sequence is the least likely to be shared: it is reused first.
            self.pool.free(reversed(table))

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Running requests go on undisturbed."""
        self.pool.forget_all()

    def check(self) -> None:
        """Raise AssertionError if blocks and tables do not add up."""
        self.pool.check()
        refs: dict[int, int] = {}
        for held in self._held.values():
            for table in held.tables:
                for block in table:
                    refs[block.id] = refs.get(block.id, 0) + 1
                    assert block.refs > 0, f"{block} is in a table and free"
        held_blocks = self.pool.num_usable - self.pool.num_free
        assert len(refs) == held_blocks, f"{held_blocks} blocks are taken, {len(refs)} are in a table"
        self.pool.check_refs(refs)

    def _extend_hashes(self, request: TokenOwner, num_blocks: int) -> None:
        hashes = request.hashes
        if not hashes and num_blocks:
            hashes += self._recent.common(request.extra_key, request.tokens)
            self._recent.keep(request.extra_key, request.tokens, hashes)
        if len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else chain_start(self._root, request.extra_key)
            extend_hashes(hashes, request.tokens, num_blocks, self.block_size, parent)
