"""Stop strings, found one character at a time: an Aho-Corasick automaton over all of them.

Its state says at once which text must be held back: the longest end of the text that begins a stop string.
(A. Aho, M. Corasick: Efficient string matching, CACM 18(6), 1975.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class StopMatch(NamedTuple):
    stop: str
    end: int  # characters of the fed text up to and including the stop string


class StopAutomaton:
    """Immutable; a request keeps only its state, an integer (0 at the start)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop: list[str | None] = [None]
        self._fail = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._stop.append(None)
                self._fail.append(0)
            node = self._next[node][char]
        self._stop[node] = stop

    def _link(self) -> None:
        """Breadth first: a node fails to the longest proper end of it that is a node too."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                self._fail[child] = self.step(self._fail[node], char)
                if self._stop[child] is None:
                    self._stop[child] = self._stop[self._fail[child]]
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][char]

    def held_back(self, state: int) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return self._depth[state]

    def feed(self, state: int, text: str, *, may_match: bool = True) -> tuple[int, StopMatch | None]:
        """Read `text`; the new state and the first stop string that is complete.

        Of several that end at the same character the longest wins. Those completed while `may_match` is False count
        as ordinary text.
        """
        for position, char in enumerate(text, 1):
            state = self.step(state, char)
            stop = self._stop[state]
            if stop is not None and may_match:
                return state, StopMatch(stop, position)
        return state, None


@lru_cache(maxsize=64)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of a set of stop strings; many requests have the same."""
    return StopAutomaton(stops)
