"""Ends an answer in time: near its limit only the tokens of a short way to the end stay allowed.

How far the end is comes from a walk ahead on a copy of the matcher, which takes what closes first, then a text known to
be a small value, then whatever costs least. While the end is nearer than the limit by more than one free token can add
to it, nothing is held back, and the walk is not repeated before that can have changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from quire.grammar.base import Matcher
from quire.grammar.ending.hints import MARGIN, Hints
from quire.grammar.vocabulary import Vocabulary

MAX_WALK = 400  # tokens
RETRY = 8  # tokens, at least, between walks that fail
MAX_TRIED = 16  # tokens at one place
_SPACE = b" \t\r\n"
_UNKNOWN = 200.0
_NUMBER_END = re.compile(r"[0-9.]+")  # may stand at the end of any number, and lead nowhere
_ORDER = {
    byte: rank
    for rank, part in enumerate((b"}]", b":", b",", b"0123456789", b"ntf", b"-", b'"', b"[", b"{"))
    for byte in part
}


@dataclass(slots=True)
class EndingState:
    """Of one answer."""

    way: list[int] | None = None  # to the end, if it is known from where the answer is now
    place: int = 0  # tokens that the answer had when the way was found
    free: int = 0  # tokens that may come before the way must be found again


@dataclass(slots=True)
class _Look:
    """What a matcher allows, as the walk sees it."""

    row: np.ndarray
    allowed: np.ndarray = field(init=False)

    def read(self, matcher: Matcher, size: int) -> _Look:
        matcher.fill(self.row)
        self.allowed = np.flatnonzero(np.unpackbits(self.row.view(np.uint8), bitorder="little")[:size])
        return self

    def allows(self, token: int | None) -> bool:
        return token is not None and bool(self.row[token // 32] >> token % 32 & 1)


class EndForcer:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        tokens = vocabulary.tokens
        self._byte = {token[0]: i for i, token in enumerate(tokens) if len(token) == 1}
        closing = [i for i, token in enumerate(tokens) if token and not token.strip(b'"}]')]
        closing.sort(key=lambda i: -len(tokens[i]))
        self._quotes = [i for i in closing if tokens[i].startswith(b'"') and tokens[i].count(b'"') == 1]
        self._brackets = [i for i in closing if b'"' not in tokens[i]]
        self._cost = np.array([_cost(token) for token in tokens], np.float32)
        self._plain_cost = np.array([_plain_cost(token) for token in tokens], np.float32)
        self._longest_text = np.array([len(t) if t.isascii() and t.isalnum() else 0 for t in tokens], np.int32)

    def fill(
        self, hints: Hints, matcher: Matcher, state: EndingState, num_tokens: int, budget: int, row: np.ndarray
    ) -> None:
        """What may come next, so that at most `budget` tokens end the answer, that one included, wherever they can.

        num_tokens: that the answer has. row: int32 [ceil(vocabulary / 32)].
        """
        if num_tokens < state.place + state.free:
            matcher.fill(row)
            return
        if hints.longest is not None and budget - 1 >= hints.longest:
            matcher.fill(row)
            return
        way = self._way(matcher, hints, state, num_tokens, budget)
        state.place, state.free, state.way = num_tokens, 0, way
        if way is None:  # from further on there may be one; walks that fail are long
            state.free = max(RETRY, budget // RETRY)
        else:
            room, step = budget - 1 - len(way), hints.growth + MARGIN
            if room > step:
                state.free = max(1, room // (step + 1))
        if state.free or not way:
            matcher.fill(row)
            if way == [] and not state.free:
                self._keep_stops(row)
            return
        row.fill(0)
        row.view(np.uint32)[way[0] // 32] |= np.uint32(1 << way[0] % 32)

    def _way(
        self, matcher: Matcher, hints: Hints, state: EndingState, num_tokens: int, budget: int
    ) -> list[int] | None:
        known, gone = state.way, num_tokens - state.place
        if known is not None and state.free == 0 and 0 <= gone <= len(known):
            return known[gone:]  # it was the only way, so it was taken
        return self.way(matcher, hints, min(budget, MAX_WALK))

    def _keep_stops(self, row: np.ndarray) -> None:
        stops = np.zeros_like(row)
        for token in self._vocabulary.stop_ids:
            stops.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        if (row & stops).any():
            row &= stops

    # The walk

    def way(self, matcher: Matcher, hints: Hints, limit: int) -> list[int] | None:
        """Tokens that complete the answer; None if the walk did not find the end within `limit` tokens."""
        ahead = matcher.fork()
        look = _Look(np.zeros(-(-self._vocabulary.size // 32), np.int32))
        way: list[int] = []
        while not ahead.may_end:
            step = self._step(ahead, hints, look.read(ahead, self._vocabulary.size), len(way))
            if len(way) + len(step) > limit or not step:
                return None
            for token in step:
                if not ahead.accept(token):
                    return None
            way += step
        return way

    def _step(self, ahead: Matcher, hints: Hints, look: _Look, place: int) -> list[int]:
        if len(look.allowed) <= 1:
            return [int(token) for token in look.allowed]
        if self._is_text(look):
            for token in islice((i for i in self._quotes if look.allows(i)), 2):
                if self._leads_out(ahead, token):
                    return [token]
        else:
            closing = next((i for i in self._brackets if look.allows(i)), None)
            if closing is not None:
                return [closing]
        found = self._by_hint(ahead, hints, look)
        if found:
            return found
        if self._is_text(look):
            lengths = self._longest_text[look.allowed]
            return [int(look.allowed[int(lengths.argmax())])]
        cheapest = int(look.allowed[int(self._cost[look.allowed].argmin())])
        if self._vocabulary.tokens[cheapest].isdigit():
            # Not the same digit for ever: 0.000… never is more than 0, 111… never divisible by 10.
            digits = (self._byte.get(0x30 + (place + i) % 10) for i in range(10))
            return [next((i for i in digits if i is not None and look.allows(i)), cheapest)]
        if self._cost[cheapest] < _UNKNOWN and not look.allows(self._byte.get(ord("z"))):
            return [cheapest]
        return [self._likeliest(ahead, look, place)]

    def _likeliest(self, ahead: Matcher, look: _Look, place: int) -> int:
        """Of tokens that mean nothing in JSON: what may be the last, else one after the other."""
        some = look.allowed[np.argsort(self._plain_cost[look.allowed], kind="stable")[:MAX_TRIED]].tolist()
        for token in some:
            other = ahead.fork()
            if other.accept(token) and other.may_end:
                return int(token)
        return int(some[place % len(some)])

    def _by_hint(self, ahead: Matcher, hints: Hints, look: _Look) -> list[int]:
        """The shortest end of a hint that leads out of any text; best where something can be closed after it."""
        ends = {
            text[at:]
            for text in hints.texts
            for at in range(len(text))
            if look.allows(self._byte.get(text[at:].encode()[0])) and not _NUMBER_END.fullmatch(text[at:])
        }
        first: list[int] = []
        for end in sorted(ends, key=lambda end: (len(end), end)):
            ids = [i for byte in end.encode() if (i := self._byte.get(byte)) is not None]
            other = ahead.fork()
            if len(ids) < len(end.encode()) or not all(map(other.accept, ids)):
                continue
            if other.may_end:
                return self._usual(ahead, end) or ids
            then = self._look(other)
            if hints.are_whole or self._is_text(then):
                continue
            if any(map(then.allows, self._brackets)):
                return self._usual(ahead, end) or ids
            first = first or self._usual(ahead, end) or ids
        return first

    def _usual(self, ahead: Matcher, text: str) -> list[int]:
        """How the text is tokenized otherwise, if it may be written so."""
        ids, other = self._vocabulary.encode(text), ahead.fork()
        return ids if all(map(other.accept, ids)) else []

    def _look(self, matcher: Matcher) -> _Look:
        return _Look(np.zeros(-(-self._vocabulary.size // 32), np.int32)).read(matcher, self._vocabulary.size)

    def _is_text(self, look: _Look) -> bool:
        """Whether anything may come: the inside of a string, or free text."""
        return all(look.allows(self._byte.get(byte)) for byte in b"z}#")

    def _leads_out(self, ahead: Matcher, token: int) -> bool:
        """Whether the token leads out of the text."""
        other = ahead.fork()
        return other.accept(token) and (other.may_end or not self._is_text(self._look(other)))


def _cost(token: bytes) -> float:
    """The lower, the sooner a JSON value is closed after this token."""
    rank = _ORDER.get(token[0]) if token else None
    return _plain_cost(token) if rank is None else 10.0 * rank + len(token) / 300


def _plain_cost(token: bytes) -> float:
    """The lower, the likelier this token ends something in any other language."""
    if not token or token[0] in _SPACE:
        return 1000.0
    return _UNKNOWN + (10.0 if token[:1].isalnum() else 0.0) + len(token) / 300
