"""The pool of KV blocks: who holds each one, which are free, which content is worth finding again.

Free blocks form one doubly linked list threaded through the blocks themselves, oldest first, so taking, freeing
and rescuing a block cost a few pointer writes each. A free block that carries a key still holds the KV of that
content: it can be found and taken back until somebody else needs the room.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.kv.block_times import BlockTimes
from quire.types.kv import NULL_BLOCK


class Block:
    """One KV block. Only the pool writes its fields."""

    __slots__ = ("id", "key", "next", "prev", "refs")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.refs = 0
        self.key: bytes | None = None  # what its full content is known by
        self.prev: Block = self  # neighbours in the free list; itself while held
        self.next: Block = self

    def __repr__(self) -> str:
        return f"Block({self.id}, refs={self.refs}, {'cached' if self.key else 'blank'})"


class BlockPool:
    """Blocks 1 … num_blocks - 1; block 0 is the null block and never leaves the pool.

    num_blocks: the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be >= 2 (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = 0
        self._blocks = [Block(i) for i in range(num_blocks)]
        self.null = self._blocks[NULL_BLOCK]  # stands in tables for what is not held
        self._cached: dict[bytes, Block] = {}
        # A ring around one sentinel: its `next` is the block to hand out first, its `prev` the last.
        self._ring = Block(-1)
        for block in self._blocks[NULL_BLOCK + 1 :]:
            self._insert_before(self._ring, block)
        self.num_free = num_blocks - 1
        self.times: BlockTimes | None = None  # if somebody asks for them

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold, all taken together."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[Block]:
        """Take `count` free blocks, the least recently useful first; what they cached is forgotten.

        Raises ValueError if fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} are free")
        taken = []
        ring, cached = self._ring, self._cached
        block = ring.next
        for _ in range(count):
            following = block.next
            block.prev = block.next = block
            block.refs = 1
            if block.key is not None:
                del cached[block.key]
                block.key = None
            taken.append(block)
            block = following
        ring.next = block
        block.prev = ring
        self.num_free -= count
        if self.times is not None:
            self.times.taken(taken)
        return taken

    def free(self, blocks: Iterable[Block]) -> None:
        """Give back one reference of each. Blank blocks are reused first, cached ones last, in the order given."""
        ring = self._ring
        for block in blocks:
            if block.refs <= 0:
                raise ValueError(f"{block} is freed more often than it was taken")
            block.refs -= 1
            if block.refs == 0:
                self._insert_before(ring.next if block.key is None else ring, block)
                self.num_free += 1
                if self.times is not None:
                    self.times.freed(block)

    def touch(self, blocks: Iterable[Block]) -> None:
        """Take one more reference of each; those that were free leave the free list with their content."""
        if self.times is not None:
            self.times.used(blocks := list(blocks))
        for block in blocks:
            if block.refs == 0:
                self._unlink(block)
                self.num_free -= 1
            block.refs += 1

    def find(self, keys: Iterable[bytes]) -> list[Block]:
        """The blocks that hold the content known by `keys`, up to the first that is not there."""
        found: list[Block] = []
        cached = self._cached
        for key in keys:
            block = cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, block: Block, key: bytes) -> None:
        """Let a held block be found by its content. If another block is known by `key` already, that one stays."""
        if block.key is None and key not in self._cached:
            block.key = key
            self._cached[key] = block

    def cached_ids(self) -> list[int]:
        """Of the blocks that can be found again, held or free."""
        return [block.id for block in self._cached.values()]

    def forget_all(self) -> None:
        """Empty the cache; blocks in use stay in use, but will not be found."""
        for block in self._cached.values():
            block.key = None
        self._cached.clear()

    def check(self) -> None:
        """Raise AssertionError if a block is lost, listed twice or known by a wrong key."""
        free = []
        block = self._ring.next
        while block is not self._ring:
            assert block.next.prev is block, "the free list is torn"
            assert block.refs == 0, f"{block} is free and held"
            free.append(block.id)
            assert len(free) <= self.num_usable, "the free list runs in a circle"
            block = block.next
        held = [b.id for b in self._blocks if b.refs > 0]
        assert len(free) == self.num_free, f"{len(free)} blocks are listed free, {self.num_free} counted"
        assert sorted(free + held) == list(range(1, self.num_blocks)), "a block is lost or the null block was taken"
        for key, block in self._cached.items():
            assert block.key == key, f"{block} is found by a key that it does not carry"
        assert sum(b.key is not None for b in self._blocks) == len(self._cached), "a block carries a stale key"

    def check_refs(self, refs: dict[int, int]) -> None:
        """Raise AssertionError if a block is not held exactly as often as `refs` says (block id → times)."""
        for block in self._blocks:
            times = refs.get(block.id, 0)
            assert block.refs == times, f"{block} is in tables {times} times"

    @staticmethod
    def _insert_before(right: Block, block: Block) -> None:
        left = right.prev
        block.prev, block.next = left, right
        left.next = right.prev = block

    @staticmethod
    def _unlink(block: Block) -> None:
        left, right = block.prev, block.next
        left.next, right.prev = right, left
        block.prev = block.next = block
