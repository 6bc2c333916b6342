"""Who of several has lately computed how much of the beginning of a text: a guess at what their prefix caches hold.

A text is known by the hashes of its beginnings, one a chunk, each made of the one before: a trie without nodes. Nothing
is compared, so a guess may be wrong, and a wrong one costs a prompt that is computed twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


def chain(text: bytes | memoryview, ends: Iterable[int], seed: Hashable = None) -> list[int]:
    """The hashes of the beginnings of `text` that end where `ends` says, in bytes, rising; what is left over has none.

    seed: texts of different ones have nothing in common. The hashes mean nothing to another process.
    """
    found, before = [], hash(seed)
    view, start = memoryview(text).cast("B"), 0
    for end in ends:
        if end > len(view):
            break
        before = hash((before, bytes(view[start:end])))
        found.append(before)
        start = end
    return found


class Affinity(Generic[P]):
    """Places that have computed beginnings of texts. The least recently used are forgotten: `capacity` are kept."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._places: OrderedDict[int, frozenset[P]] = OrderedDict()  # by the hash of a beginning

    def __len__(self) -> int:
        return len(self._places)

    def find(self, hashes: Sequence[int]) -> dict[P, int]:
        """The places that have some of this text, and how many chunks of it."""
        found: dict[P, int] = {}
        there: frozenset[P] = frozenset()
        depth = 0
        for key in hashes:
            places = self._places.get(key)
            if places is None:
                break
            if places is not there:  # mostly a text's beginnings have all been at the same places, in the same set
                left = places if not depth else there & places
                if not left:
                    break
                found.update(dict.fromkeys(there - left, depth))
                there = left
            depth += 1
        found.update(dict.fromkeys(there, depth))
        return found

    def note(self, hashes: Sequence[int], place: P) -> None:
        """`place` computes this text."""
        one = before = joined = frozenset((place,))
        for key in reversed(hashes):  # the longest grows old first
            places = self._places.get(key)
            if places is None:
                self._places[key] = one
                continue
            if place not in places:
                before, joined = (before, joined) if places is before else (places, places | one)
                self._places[key] = joined
            self._places.move_to_end(key)
        while len(self._places) > self._capacity:
            self._places.popitem(last=False)

    def forget(self, place: P) -> None:
        """It has nothing any more."""
        for key, places in list(self._places.items()):
            if place in places:
                if left := places - {place}:
                    self._places[key] = left
                else:
                    del self._places[key]
