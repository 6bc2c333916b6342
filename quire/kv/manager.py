"""KVManager: the block tables of all requests that hold blocks, and the prefix cache over them.

A full block of known tokens is registered as soon as the step that fills it is planned. That is safe: all steps run on
one stream, and within a step every layer writes the KV of the whole batch before it reads any. So a request may hit
blocks that a neighbour in the very same plan computes. Blocks of sampled tokens are registered when their request
ends or is preempted: nobody knows these tokens sooner, and hashing many blocks at once is cheaper.

A model's layers may be several groups, each with a table of its own a request; all take their blocks from one pool. A
hit is the longest beginning that every group can serve, and ends where blocks of all of them end; where layers keep a
state, it ends where there is a copy of one (`kv/snapshots.py`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Protocol

from quire.foundation.errors import ConfigError
from quire.kv.block_pool import Block, BlockPool
from quire.kv.group import BlockNames, CachedGroup
from quire.kv.hashing import BlockHasher, RecentChains
from quire.kv.kinds import CACHED, UNSHARED, make_group
from quire.kv.snapshots import STEP, Copies, Snapshots, spacing
from quire.types.kv import MAX_TOKENS, NULL_BLOCK, KVGroupSpec, capacity

Hit = list[list[Block]]  # table entries, one list a group


class TokenOwner(Protocol):
    """What the manager must know of a request."""

    id: str
    tokens: array[int]  # int32, known ones only
    hashes: list[bytes]  # its chain, grown here
    extra_key: bytes  # what besides tokens names its KV


class _Held:
    __slots__ = ("firsts", "num_registered", "tables")

    def __init__(self, tables: Hit) -> None:
        self.tables = tables  # one a group
        self.firsts = [_first_held(table) for table in tables]  # entries before these are the null block
        self.num_registered = [len(table) for table in tables]  # leading entries that were offered to the cache

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.tables)) - sum(self.firsts)


class KVManager:
    """num_blocks: pages of the pool that all groups share, the null block included.

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
        if not groups:
            raise ConfigError("a model must have a KV group, if only one that keeps nothing")
        self.pool = BlockPool(num_blocks)
        states = [i for i, spec in enumerate(groups) if spec.kind == "state"]
        cached = [spec.block_size for spec in groups if spec.kind in CACHED] or [
            STEP if states else groups[0].block_size
        ]
        self._unit = math.gcd(*cached)  # tokens that a link of a chain stands for
        self._names = [BlockNames(self.pool, i, spec.block_size, self._unit) for i, spec in enumerate(groups)]
        self.groups = [make_group(spec, names) for spec, names in zip(groups, self._names, strict=True)]
        kinds = {spec.kind for spec in groups}
        self.enable_prefix_caching = enable_prefix_caching and bool(kinds & {*CACHED, "state"}) and not kinds & UNSHARED
        # Tokens: where blocks of all groups end.
        self.alignment = math.lcm(*cached) if self.enable_prefix_caching else 1
        self.block_sizes = [spec.block_size for spec in groups]
        self.capacity = capacity(groups, num_blocks)  # tokens that one request can hold when it is alone
        self._cached = [(i, group) for i, group in enumerate(self.groups) if isinstance(group, CachedGroup)]
        self._windows = [i for i, spec in enumerate(groups) if spec.window]
        self._state = states[0] if states else 0
        self._snapshots = None
        if states and self.enable_prefix_caching:
            pages = groups[self._state].pages
            far = spacing(groups, pages)
            self._snapshots = Snapshots(self.pool, pages, self._unit, self.alignment, far)
        self._hasher = BlockHasher(seed)
        self._recent = RecentChains(self._unit)
        self._held: dict[str, _Held] = {}

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 … 1."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    @property
    def keeps_history_apart(self) -> bool:
        """Whether the ids of tokens that are found in the cache must be told to the worker."""
        return any(group.spec.kind == "history" for group in self.groups)

    @property
    def shareable(self) -> int | None:
        """The group whose tables show which requests begin alike and read all of that; None: there is none."""
        full = [i for i, group in enumerate(self.groups) if group.spec.kind == "full"]
        return full[0] if full else None

    # --- the prefix cache ---------------------------------------------------------------------------------------

    def find_cached(self, request: TokenOwner, max_tokens: int) -> tuple[Hit, int]:
        """The cached beginning of `request`: its blocks and how many tokens they cover, at most `max_tokens`."""
        return self._find(request, 0, max_tokens)

    def find_more(self, request: TokenOwner, num_computed: int, max_tokens: int) -> tuple[Hit, int]:
        """Cached blocks that continue the tables of a running request which stands at the end of blocks. One that keeps
        a state goes on with its own."""
        if num_computed % self.alignment or self._snapshots is not None:
            return [[] for _ in self.groups], 0
        return self._find(request, num_computed, max_tokens)

    def _find(self, request: TokenOwner, first: int, max_tokens: int) -> tuple[Hit, int]:
        """first: tokens whose blocks the request holds."""
        hit: Hit = [[] for _ in self.groups]
        most = max_tokens // self.alignment * self.alignment if self.enable_prefix_caching else 0
        if most <= first:
            return hit, 0
        self._extend_chain(request, most)
        asked = list(self._cached)
        while True:
            while asked:
                number, group = asked.pop(0)
                hit[number] = group.find(request.hashes, first, most, self.alignment)
                end = first + len(hit[number]) * group.spec.block_size
                if end < most:  # the others have promised more
                    most = end
                    asked += [
                        (i, other)
                        for i, other in self._cached
                        if i != number and not other.serves_less and (i, other) not in asked
                    ]
            end = most if self._snapshots is None else self._snapshots.longest(request.hashes, most)
            if end == most:
                break
            most = end
            asked = [(i, other) for i, other in self._cached if not other.serves_less]
        blocks = [blocks[: (most - first) // size] for blocks, size in zip(hit, self.block_sizes, strict=True)]
        return blocks, most - first

    def register(self, request: TokenOwner, num_tokens: int) -> None:
        """Offer to the cache all full blocks among the first `num_tokens` tokens (all known, KV planned)."""
        if not self.enable_prefix_caching:
            return
        held = self._held[request.id]
        for number, _ in self._cached:
            full, known = num_tokens // self.block_sizes[number], held.num_registered[number]
            if full <= known:
                continue
            self._extend_chain(request, full * self.block_sizes[number])
            names, table = self._names[number], held.tables[number]
            for i in range(max(known, held.firsts[number]), full):
                names.register(table[i], request.hashes, i)
            held.num_registered[number] = full

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Running requests go on undisturbed."""
        self.pool.forget_all()
        if self._snapshots is not None:
            self._snapshots.forget_all()

    def _extend_chain(self, request: TokenOwner, num_tokens: int) -> None:
        """Names for `num_tokens` tokens at least. As a call costs more than a name, it names all that is known."""
        chain = request.hashes
        if num_tokens // self._unit <= len(chain):
            return
        if not chain:
            chain += self._recent.common(request.extra_key, request.tokens)
            self._recent.keep(request.extra_key, request.tokens, chain)
        self._hasher.extend(chain, request.tokens, len(request.tokens) // self._unit, self._unit, request.extra_key)

    # --- states -------------------------------------------------------------------------------------------------

    def next_stop(self, request: TokenOwner, start: int) -> int:
        """Where a chunk from token `start` on ends at the latest, for the sake of a copy of the state there."""
        return MAX_TOKENS if self._snapshots is None else self._snapshots.next_stop(request, start)

    def reach_state(self, request: TokenOwner, end: int) -> None:
        """A chunk of the plan being made ends behind token `end` - 1."""
        if self._snapshots is not None:
            self._snapshots.reach(request, end)

    def take_copies(self) -> tuple[Copies, Copies]:
        """Of states, that the worker makes before the plan that was just made, and after it."""
        if self._snapshots is None:
            return [], []
        return self._snapshots.take(lambda owner: self._held[owner.id].tables[self._state])

    # --- what requests hold -------------------------------------------------------------------------------------

    def num_needed(self, num_tokens: int, hit: Hit) -> int:
        """Free blocks that new tables for `num_tokens` tokens take, those of `hit` that are free now included."""
        needed = 0
        for group, blocks in zip(self.groups, hit, strict=True):
            held = [block for block in blocks if block.id != NULL_BLOCK] if group.spec.window else blocks
            free = [block for block in held if not block.refs]
            needed += group.spec.most_blocks(num_tokens) - len(held) + len(free)
        return needed

    def num_missing(self, request: TokenOwner, num_tokens: int) -> int:
        """Blocks that a running request on its way to `num_tokens` tokens may still lack."""
        held = self._held[request.id]
        return sum(
            max(0, group.spec.most_blocks(num_tokens) - len(table) + first)
            for group, table, first in zip(self.groups, held.tables, held.firsts, strict=True)
        )

    def num_held(self, request: TokenOwner) -> int:
        return self._held[request.id].num_blocks

    def admit(self, request: TokenOwner, hit: Hit, num_cached: int) -> None:
        """Open the tables of a request with what `find_cached` found just now."""
        if self._snapshots is not None:
            self._extend_chain(request, len(request.tokens))
            self._snapshots.begin(request, num_cached)
        held = self._held[request.id] = _Held([list(blocks) for blocks in hit])
        for table, first in zip(held.tables, held.firsts, strict=True):
            self.pool.touch(table[first:] if first else table)

    def adopt(self, request: TokenOwner, hit: Hit, num_computed: int) -> None:
        """Append what `find_more` found, which makes `num_computed` tokens in all."""
        held = self._held[request.id]
        for blocks in hit:
            self.pool.touch(block for block in blocks if block.id != NULL_BLOCK)
        for number, blocks in enumerate(hit):
            held.tables[number].extend(blocks)
            if blocks:
                held.num_registered[number] = len(held.tables[number])
        self.free_behind(request, num_computed)

    def num_short(self, request: TokenOwner, num_tokens: int) -> int:
        """Blocks that the tables lack to hold `num_tokens` tokens."""
        return sum(self._counts_short(request, num_tokens))

    def _counts_short(self, request: TokenOwner, num_tokens: int) -> list[int]:
        """Of each group."""
        tables = self._held[request.id].tables
        return [
            max(0, group.spec.num_blocks(num_tokens) - len(table))
            for group, table in zip(self.groups, tables, strict=True)
        ]

    def reach(self, request: TokenOwner, num_tokens: int) -> int:
        """How many tokens, up to `num_tokens`, the tables can hold with all blocks that are free."""
        if self.num_short(request, num_tokens) <= self.num_free:
            return num_tokens
        least, most = 0, num_tokens - 1
        while least < most:
            middle = (least + most + 1) // 2
            if self.num_short(request, middle) <= self.num_free:
                least = middle
            else:
                most = middle - 1
        return least

    def allocate(self, request: TokenOwner, num_tokens: int) -> Hit | None:
        """Grow the tables to hold `num_tokens` tokens. Returns the new blocks a group, None if too few are free."""
        tables, counts = self._held[request.id].tables, self._counts_short(request, num_tokens)
        if sum(counts) > self.pool.num_free:
            return None
        new = [self.pool.allocate(count) for count in counts]
        for table, blocks in zip(tables, new, strict=True):
            table.extend(blocks)
        return new

    def trim(self, request: TokenOwner, num_tokens: int) -> None:
        """Give back the blocks behind those that `num_tokens` tokens need; none of them was registered."""
        for group, table in zip(self.groups, self._held[request.id].tables, strict=True):
            kept = group.spec.num_blocks(num_tokens)
            self.pool.free(reversed(table[kept:]))
            del table[kept:]

    def allocate_one_each(self, group: int, requests: Sequence[TokenOwner]) -> list[Block]:
        """One more block in this group for every request: new blocks in the order of `requests`.

        Raises ValueError if too few are free.
        """
        blocks = self.pool.allocate(len(requests))
        for request, block in zip(requests, blocks, strict=True):
            self._held[request.id].tables[group].append(block)
        return blocks

    @property
    def frees_behind(self) -> bool:
        """Whether requests give blocks back while they run."""
        return bool(self._windows)

    def free_behind(self, request: TokenOwner, num_computed: int) -> None:
        """Give back what no token from `num_computed` on reads. The plan being made must not compute any before it:
        others may write to these blocks in the very same step."""
        for number in self._windows:
            self.free_behind_each(number, [request], [num_computed])

    def free_behind_each(self, group: int, requests: Sequence[TokenOwner], num_computed: Sequence[int]) -> None:
        """The same in one group for many requests."""
        first_needed, null, given_back = self.groups[group].first_needed, self.pool.null, []
        for request, computed in zip(requests, num_computed, strict=True):
            held = self._held[request.id]
            first, needed = held.firsts[group], first_needed(computed)
            if first < needed:
                table = held.tables[group]
                for entry in range(first, needed):
                    given_back.append(table[entry])
                    table[entry] = null
                held.firsts[group] = needed
        self.pool.free(block for block in given_back if block is not null)

    def table(self, request: TokenOwner) -> Hit:
        """The blocks of a request, a list a group. Not to be changed."""
        return self._held[request.id].tables

    def held(self, request: TokenOwner) -> Hit:
        """The ends of its tables that hold something."""
        held = self._held[request.id]
        return [table[first:] for table, first in zip(held.tables, held.firsts, strict=True)]

    def room(self, request: TokenOwner) -> list[int]:
        """Tokens that its table of each group can hold."""
        tables = self._held[request.id].tables
        return [min(len(table) * size, MAX_TOKENS) for table, size in zip(tables, self.block_sizes, strict=True)]

    def free(self, request: TokenOwner) -> None:
        """Close the tables of a request."""
        held = self._held.pop(request.id)
        if self._snapshots is not None:
            self._snapshots.end(request)
        for table, first in zip(held.tables, held.firsts, strict=True):
            # The end of a sequence is the least likely to be shared: it is reused first.
            self.pool.free(reversed(table[first:] if first else table))

    def check(self) -> None:
        """Raise AssertionError if blocks and tables do not add up."""
        self.pool.check()
        refs: dict[int, int] = {}
        for held in self._held.values():
            for number, table in enumerate(held.tables):
                first = held.firsts[number]
                assert all(block.id == NULL_BLOCK for block in table[:first]), "a block is held that was given back"
                for block in table[first:]:
                    refs[block.id] = refs.get(block.id, 0) + 1
                    assert block.id != NULL_BLOCK, "the null block stands where a block is needed"
                    assert block.refs > 0, f"{block} is in a table and free"
        held_blocks = self.pool.num_usable - self.pool.num_free
        assert len(refs) == held_blocks, f"{held_blocks} blocks are taken, {len(refs)} are in a table"
        self.pool.check_refs(refs)


def _first_held(table: list[Block]) -> int:
    return next((i for i, block in enumerate(table) if block.id != NULL_BLOCK), len(table))
