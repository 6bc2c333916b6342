"""Copies of one compiled grammar, so that answers under it are followed side by side.

llguidance's copies of a matcher share one lexer behind one lock: masks of answers that began as copies of the same
matcher are made one after the other, however many threads there are. Matchers that were built apart share nothing. So a
grammar that several answers need at once is built again, in the background, up to once a thread, and each answer begins
as a copy of the least busy one. That is decided at its first token; its first mask is that of every other.

A lexer that met its limits once gives up sooner from then on. So a copy under which an answer failed is built anew.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MAX_THREADS = 8


def usable_threads() -> int:
    """Half of the cores this process may run on, and no more than RAYON_NUM_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("RAYON_NUM_THREADS", "")
    return min(MAX_THREADS, max(1, cores // 2), int(limit) if limit.isdecimal() and int(limit) else MAX_THREADS)


class MatcherCopy:
    """One matcher of a grammar that shares nothing with the others, at its beginning."""

    __slots__ = ("answers", "has_failed", "matcher")

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.has_failed = False  # an answer under it met the limits; no more begin here once there is another copy
        self.answers: weakref.WeakSet[object] = weakref.WeakSet()  # that began as copies of it


class MatcherCopies:
    """Of one grammar. Used by one thread, but for the builder's.

    build: makes another matcher, without the GIL; None: there is to be one copy. most: copies.
    """

    def __init__(self, first: Any, build: Callable[[], Any] | None, most: int, builder: ThreadPoolExecutor) -> None:
        self.first = first  # for questions about the beginning
        self._copies = [MatcherCopy(first)]
        self._build = build
        self._most = 1 if build is None else most
        self._builder = builder
        self._num_wanted = 1
        self._answers: weakref.WeakSet[object] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._copies)

    def expect(self, answer: object) -> None:
        """An answer begins, and will soon take a copy."""
        self._answers.add(answer)
        while self._num_wanted < min(self._most, len(self._answers)):
            self._num_wanted += 1
            self._builder.submit(self._add)

    def take(self, answer: object) -> MatcherCopy:
        """The copy with the fewest answers; this one is among them from now on, as long as it lives."""
        shared = min(self._copies, key=lambda shared: (shared.has_failed, len(shared.answers)))
        shared.answers.add(answer)
        return shared

    def replace(self, shared: MatcherCopy) -> None:
        """An answer under it failed."""
        if not shared.has_failed:
            shared.has_failed = True
            if self._build is not None:
                self._builder.submit(self._add, shared)

    def _add(self, instead_of: MatcherCopy | None = None) -> None:
        assert self._build is not None
        matcher = self._build()
        if matcher.is_error():
            return
        self._copies.append(MatcherCopy(matcher))
        if instead_of is not None:
            self._copies.remove(instead_of)
