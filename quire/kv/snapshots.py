"""Copies of states at a few places of a prompt, for others that begin alike.

A state stands for all tokens before the next one, which overwrites it: it can be found again only where a copy was
made. A copy takes as many pages as a state, is named by the tokens before it like a block, and is nobody's: it lives
until its pages are needed, the least recently used first.

Copies are large, so there are few: where the beginning ends that a prompt has in common with one before it (others will
have it too), at the last place from which the same prompt could go on, and in long prompts where a chunk ends anyway,
as far apart as makes copies take no more than the keys and values between them.

The worker copies after the step in which a state gets there, and back before the step of whoever goes on from it. So
what is copied in a plan can be found from the next one on.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.kv.block_pool import Block, BlockPool
from quire.kv.group import Chain
from quire.types.kv import MAX_TOKENS, KVGroupSpec

STEP = 16  # tokens between places where copies may be, in a model that keeps nothing but states
_SPACING = 8192  # likewise, between copies within a prompt
_SEEN = 1 << 16  # beginnings of prompts that are remembered

Copies = list[tuple[list[int], list[int]]]  # (pages of a state, pages that become the same)


class StateOwner(Protocol):
    """What must be known of a request."""

    id: str
    tokens: array[int]
    hashes: Chain


@dataclass(slots=True)
class _Way:
    """A request on its way through its tokens."""

    owner: StateOwner
    stops: list[int]  # tokens behind which a copy is wanted, rising
    last: int  # tokens behind which there is one


class Snapshots:
    """pages: that a state takes. unit: tokens of a link of a chain; alignment: of places, a multiple of the unit;
    spacing: tokens that are worth a copy within a prompt."""

    def __init__(self, pool: BlockPool, pages: int, unit: int, alignment: int, spacing: int) -> None:
        self._pool, self._alignment, self._unit, self._spacing = pool, alignment, unit, spacing
        self._pages = [b"state" + page.to_bytes(4, "big") for page in range(pages)]
        self._ways: dict[str, _Way] = {}
        self._seen: dict[bytes, None] = {}  # names of beginnings, the oldest first
        self._restores: dict[str, list[int]] = {}  # pages that requests of the plan being made go on from
        self._reached: list[tuple[StateOwner, int]] = []  # places of which that plan wants copies

    def longest(self, chain: Chain, most: int) -> int:
        """Tokens, up to `most`, behind which there is a copy of a state; 0: none. The chain reaches as far."""
        links, last = self._alignment // self._unit, most // self._alignment
        first_page = self._pages[0]
        for number in range(last, 0, -1):  # few places have one, and then all of its pages
            if self._pool.find((chain[number * links - 1] + first_page,)) and self._find(
                chain, number * self._alignment
            ):
                return number * self._alignment
        return 0

    def _find(self, chain: Chain, place: int) -> list[Block]:
        """The pages of a copy; empty unless all are there."""
        found = self._pool.find(self._names(chain, place))
        return found if len(found) == len(self._pages) else []

    def _names(self, chain: Chain, place: int) -> list[bytes]:
        name = chain[place // self._unit - 1]
        return [name + page for page in self._pages]

    # --- a request on its way -----------------------------------------------------------------------------------

    def begin(self, owner: StateOwner, num_cached: int) -> None:
        """It goes on from the copy behind its first `num_cached` tokens, or from nothing. Its chain is whole."""
        last = (len(owner.tokens) - 1) // self._alignment * self._alignment
        stops = {self._known(owner.hashes, last), last}
        self._ways[owner.id] = _Way(owner, sorted(stop for stop in stops if stop > num_cached), num_cached)
        if num_cached:
            copy = self._find(owner.hashes, num_cached)
            self._use(copy)
            self._restores[owner.id] = [block.id for block in copy]

    def _known(self, chain: Chain, last: int) -> int:
        """Tokens that others began with as well; from now on all up to `last` are known."""
        seen, common = self._seen, 0
        names = chain[self._alignment // self._unit - 1 : last // self._unit : self._alignment // self._unit]
        for name in names:
            if name not in seen:
                break
            common += self._alignment
        for name in reversed(names):  # the longest grows old first
            seen.pop(name, None)
            seen[name] = None
        while len(seen) > _SEEN:
            del seen[next(iter(seen))]
        return common

    def _use(self, copy: Sequence[Block]) -> None:
        """It is the last now to be forgotten."""
        self._pool.touch(copy)
        self._pool.free(copy)

    def next_stop(self, owner: StateOwner, start: int) -> int:
        """Where a chunk from token `start` on ends at the latest."""
        return next((stop for stop in self._ways[owner.id].stops if stop > start), MAX_TOKENS)

    def reach(self, owner: StateOwner, end: int) -> None:
        """A chunk of the plan being made ends behind token `end` - 1."""
        way = self._ways[owner.id]
        if end % self._alignment:
            return
        is_far = min(end - way.last, self.next_stop(owner, end) - end) >= self._spacing
        if end in way.stops or (is_far and end < len(owner.tokens)):
            self._reached.append((owner, end))
            way.last = end

    def end(self, owner: StateOwner) -> None:
        """It gives its state back."""
        del self._ways[owner.id]
        self._restores.pop(owner.id, None)

    # --- a plan -------------------------------------------------------------------------------------------------

    def take(self, state: Callable[[StateOwner], list[Block]]) -> tuple[Copies, Copies]:
        """What the worker copies before the plan that was just made, and after it. state: of a request.

        Copies get pages that are free when all is planned; where there are too few there is none.
        """
        ways = self._ways
        before = [(pages, _ids(state(ways[name].owner))) for name, pages in self._restores.items()]
        after: Copies = []
        held: list[Block] = []  # as long as there are more, lest one takes another's pages
        for owner, end in self._reached:
            if copy := self._find(owner.hashes, end):
                if copy[0] not in held:
                    self._use(copy)
            elif self._pool.num_free >= len(self._pages):
                copy = self._pool.allocate(len(self._pages))
                for block, name in zip(copy, self._names(owner.hashes, end), strict=True):
                    self._pool.register(block, name)
                held += copy
                after.append((_ids(state(owner)), _ids(copy)))
        self._pool.free(held)
        self._restores, self._reached = {}, []
        return before, after

    def forget_all(self) -> None:
        """What others began with."""
        self._seen.clear()


def spacing(groups: Sequence[KVGroupSpec], pages: int) -> int:
    """Tokens whose keys and values take as many pages as a state."""
    per_token = sum(1 / group.block_size for group in groups if group.keeps_all)
    return math.ceil(pages / per_token) if per_token else _SPACING


def _ids(blocks: Sequence[Block]) -> list[int]:
    return [block.id for block in blocks]
