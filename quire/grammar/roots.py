"""Copies of one compiled grammar, so that answers under it are followed side by side.

llguidance's copies of a matcher share one lexer behind one lock: masks of answers that began as copies of the same
matcher are made one after the other, however many threads there are. Matchers that were built apart share nothing. So a
grammar that several answers need at once is built again, in the background, up to once a thread, and each answer begins
as a copy of the least busy root. That is decided at its first token; its first mask is that of every other.

A lexer that met its limits once gives up sooner from then on. So a root under which an answer failed gets no new ones.
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


class Root:
    """One matcher of a grammar that shares nothing with the others, at its beginning."""

    __slots__ = ("answers", "matcher")

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.answers: weakref.WeakSet[object] = weakref.WeakSet()  # that began as copies of it


class Roots:
    """Of one grammar. Used by one thread, but for the builder's.

    build: makes another matcher, without the GIL. most: roots.
    """

    def __init__(self, first: Any, build: Callable[[], Any], most: int, builder: ThreadPoolExecutor) -> None:
        self.first = first  # for questions about the beginning
        self._roots = [Root(first)]
        self._build = build
        self._most = most
        self._builder = builder
        self._num_wanted = 1
        self._answers: weakref.WeakSet[object] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._roots)

    def expect(self, answer: object) -> None:
        """An answer begins, and will soon take a root."""
        self._answers.add(answer)
        while self._num_wanted < min(self._most, len(self._answers)):
            self._num_wanted += 1
            self._builder.submit(self._add)

    def take(self, answer: object) -> Root:
        """The root with the fewest answers; this one is among them from now on, as long as it lives."""
        if not self._roots:
            self._roots.append(Root(self._build()))
        root = min(self._roots, key=lambda root: len(root.answers))
        root.answers.add(answer)
        return root

    def retire(self, root: Root) -> None:
        """No more answers begin there."""
        if root in self._roots:
            self._roots.remove(root)
            self._num_wanted = max(1, self._num_wanted - 1)

    def _add(self) -> None:
        matcher = self._build()
        if not matcher.is_error():
            self._roots.append(Root(matcher))
