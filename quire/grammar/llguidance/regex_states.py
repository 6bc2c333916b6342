"""Where in a regular expression a text has come to: texts after which the same may follow get the same place.

What the library allows at a place of a regex is costly to find where it is most of the vocabulary, and it is the same
for all texts that lead there. The library does not tell its places, so they are found a second time: by derivatives
(Brzozowski, 1964), whose equal terms are the same place. Some equal places get several names, never the reverse.
Only what Python's parser and the library read alike is followed: characters, classes, groups, alternatives and greedy
repetitions.
"""

from __future__ import annotations

import codecs
import re
import warnings
from bisect import bisect_right
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

_HIGHEST = 0x10FFFF
_CLASSES = {  # as tags_lark.ASCII_CLASSES says
    "DIGIT": ((0x30, 0x39),),
    "WORD": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "SPACE": ((0x09, 0x0D), (0x20, 0x20)),
}
_MAX_PATTERN = 500  # characters; longer ones are not followed: reading them holds the interpreter lock too long
_MAX_STEPS = 200_000  # of finding places of one regex, each about a microsecond; then it is not followed any further …
_MAX_NEW_STEPS = 4000  # … nor if one token takes so many

Ranges = tuple[tuple[int, int], ...]  # of code points, ends included, rising, apart


class _UnknownError(Exception):
    """Something that is not followed."""


class Term:
    """A regular expression. Equal ones of one RegexStates are the same object."""

    __slots__ = ("kind", "nullable", "parts")

    def __init__(self, kind: str, parts: tuple[Any, ...], nullable: bool) -> None:
        self.kind = kind  # "none", "empty", "set", "then", "either", "repeat"
        self.parts = parts
        self.nullable = nullable  # it matches the empty text


class RegexState(NamedTuple):
    """After a text. rest: the first bytes of a character whose others are to come."""

    term: Term
    rest: bytes


class RegexStates:
    """Of one pattern; `start` is None if it is not followed."""

    def __init__(self, pattern: str) -> None:
        self._terms: dict[tuple[Any, ...], Term] = {}
        self._moves: dict[tuple[Term, int], Term] = {}  # by class of character
        self._classes: dict[str, int] = {}  # of characters that were met: which characters are alike to this pattern
        self._steps_left = _MAX_STEPS
        self._steps_now = _MAX_NEW_STEPS  # that the token at hand may take
        self._none = self._term("none", (), nullable=False)
        self._empty = self._term("empty", (), nullable=True)
        self.start: RegexState | None = None
        try:
            if len(pattern) > _MAX_PATTERN:
                return
            term = self._read(_parsed(pattern))
        except (_UnknownError, re.error, Warning, OverflowError, RecursionError):
            return
        bounds = {0}
        for other in self._terms.values():
            if other.kind == "set":
                bounds.update(bound for low, high in other.parts for bound in (low, high + 1))
        self._bounds = sorted(bounds)
        self.start = RegexState(term, b"")

    def after(self, place: RegexState, text: bytes) -> RegexState | None:
        """The place that `text` leads to; None if that is not known."""
        data = place.rest + text
        try:
            chars, num_read = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            return None
        term = place.term
        self._steps_now = _MAX_NEW_STEPS
        try:
            for char in chars:
                number = self._classes.get(char)
                if number is None:
                    number = self._classes[char] = bisect_right(self._bounds, ord(char)) - 1
                term = self._moves.get((term, number)) or self._derive(term, number)
        except (_UnknownError, RecursionError):
            self._steps_left = 0
            return None
        return None if term is self._none else RegexState(term, data[num_read:])

    def _spend(self, steps: int) -> None:
        """Raises _UnknownError."""
        self._steps_left -= steps
        self._steps_now -= steps
        if min(self._steps_left, self._steps_now) < 0:
            raise _UnknownError("too many places")

    # Terms

    def _term(self, kind: str, parts: tuple[Any, ...], *, nullable: bool) -> Term:
        key = (kind, *parts)
        found = self._terms.get(key)
        if found is None:
            self._spend(1)
            found = self._terms[key] = Term(kind, parts, nullable)
        return found

    def _set(self, ranges: Ranges) -> Term:
        return self._term("set", ranges, nullable=False) if ranges else self._none

    def _then(self, first: Term, second: Term) -> Term:
        if first is self._none or second is self._none:
            return self._none
        if first is self._empty:
            return second
        if second is self._empty:
            return first
        if first.kind == "then":
            return self._then(first.parts[0], self._then(first.parts[1], second))
        return self._term("then", (first, second), nullable=first.nullable and second.nullable)

    def _either(self, terms: list[Term]) -> Term:
        flat: set[Term] = {part for term in terms for part in (term.parts if term.kind == "either" else (term,))} - {
            self._none
        }
        self._spend(len(flat))
        if len(flat) <= 1:
            return flat.pop() if flat else self._none
        return self._term("either", tuple(sorted(flat, key=id)), nullable=any(term.nullable for term in flat))

    def _repeat(self, term: Term, least: int, most: int | None) -> Term:
        if most == 0 or term is self._empty:
            return self._empty
        if term is self._none:
            return self._none if least else self._empty
        if (least, most) == (1, 1):
            return term
        return self._term("repeat", (term, least, most), nullable=term.nullable or least == 0)

    def _derive(self, term: Term, number: int) -> Term:
        """What is left of the term after a character of this class. Raises _UnknownError when that gets too costly."""
        found = self._moves.get((term, number))
        if found is None:
            self._spend(1)
            found = self._moves[(term, number)] = self._derived(term, number)
        return found

    def _derived(self, term: Term, number: int) -> Term:
        match term.kind:
            case "set":
                code = self._bounds[number]
                return self._empty if any(low <= code <= high for low, high in term.parts) else self._none
            case "then":
                first, second = term.parts
                ways = [self._then(self._derive(first, number), second)]
                if first.nullable:
                    ways.append(self._derive(second, number))
                return self._either(ways)
            case "either":
                return self._either([self._derive(part, number) for part in term.parts])
            case "repeat":
                one, least, most = term.parts
                left = self._repeat(one, max(0, least - 1), None if most is None else most - 1)
                return self._then(self._derive(one, number), left)
        return self._none

    # Patterns

    def _read(self, parsed: Any) -> Term:
        term = self._empty
        for name, value in reversed(list(parsed)):
            term = self._then(self._read_one(str(name), value), term)
        return term

    def _read_one(self, name: str, value: Any) -> Term:
        match name:
            case "LITERAL":
                return self._set(((value, value),))
            case "NOT_LITERAL":
                return self._set(_others(((value, value),)))
            case "ANY":
                return self._set(_others(((0x0A, 0x0A),)))
            case "IN":
                return self._set(_members(value))
            case "BRANCH":
                return self._either([self._read(branch) for branch in value[1]])
            case "SUBPATTERN":
                _, added, dropped, inner = value
                if not (added or dropped):
                    return self._read(inner)
            case "MAX_REPEAT":
                least, most, inner = value
                return self._repeat(self._read(inner), int(least), None if most is _parser.MAXREPEAT else int(most))
        raise _UnknownError(name)


def _parsed(pattern: str) -> list[Any]:
    """Without the anchors around it. Raises what Python's parser does, and for what it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parsed = _parser.parse(pattern)
    if parsed.state.flags & ~re.UNICODE:
        raise _UnknownError("flags")
    items = list(parsed)
    if items and str(items[0][1]) == "AT_BEGINNING":
        items = items[1:]
    if items and str(items[-1][1]) == "AT_END":
        items = items[:-1]
    return items


def _members(items: Any) -> Ranges:
    ranges: list[tuple[int, int]] = []
    negated = False
    for name, value in items:
        match str(name):
            case "NEGATE":
                negated = True
            case "LITERAL":
                ranges.append((value, value))
            case "RANGE":
                ranges.append(value)
            case "CATEGORY":
                _, *no, kind = str(value).split("_")
                if kind not in _CLASSES:
                    raise _UnknownError(value)
                ranges += _others(_CLASSES[kind]) if no else _CLASSES[kind]
            case _:
                raise _UnknownError(name)
    joined = _joined(ranges)
    return _others(joined) if negated else joined


def _joined(ranges: list[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def _others(ranges: Ranges) -> Ranges:
    found, next_low = [], 0
    for low, high in ranges:
        if next_low < low:
            found.append((next_low, low - 1))
        next_low = high + 1
    if next_low <= _HIGHEST:
        found.append((next_low, _HIGHEST))
    return tuple(found)
