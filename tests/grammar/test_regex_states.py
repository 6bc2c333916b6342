"""Places in regexes are told apart where they differ: judged by Python's own matching, and by what follows."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.grammar.llguidance.mask_cache import MaskCache, PlaceMasks
from quire.grammar.llguidance.regex_states import RegexStates

ALPHABET = "abx09 _-é日\n"
_ATOMS = st.sampled_from(
    ["a", "b", "é", "日", ".", "[ab]", "[^a]", "[a-x]", r"\d", r"\w", r"\S", r"[^\W_]", r"[\s-]", "[^é-日]", "x0"]
)
_PATTERNS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=8,
)
_TEXTS = st.text(ALPHABET, max_size=8)


@settings(max_examples=400, deadline=None)
@given(_PATTERNS, st.lists(_TEXTS, min_size=1, max_size=6), st.integers(0, 1 << 30))
def test_places_are_those_of_the_pattern(pattern: str, texts: list[str], seed: int) -> None:
    """A text's place is complete where Python matches it as a whole; texts at one place go on alike."""
    states, judge, cuts = RegexStates(pattern), re.compile(pattern, re.ASCII), random.Random(seed)
    assert states.start is not None
    by_place: dict[object, str] = {}
    for text in texts:
        data, place = text.encode(), states.after(states.start, b"")
        while data and place is not None:
            cut = cuts.randint(1, len(data))
            data, place = data[cut:], states.after(place, data[:cut])
        if place is None:  # nothing that begins so is matched: at least no text of ours
            assert not any(judge.fullmatch(text + more) for more in texts)
            continue
        assert place.rest == b""
        assert place.term.nullable == bool(judge.fullmatch(text))
        twin = by_place.setdefault(place, text)
        for more in texts:
            assert bool(judge.fullmatch(twin + more)) == bool(judge.fullmatch(text + more))


def test_equal_counts_are_one_place_and_others_are_not() -> None:
    states = RegexStates("([a-z]+ ){3,5}")
    assert states.start is not None
    one, other = states.after(states.start, b"abc de"), states.after(states.start, b"z zz")
    assert one is not None
    assert one == other
    assert one != states.after(states.start, b"abc")
    assert one != states.after(states.start, b"abc de ")


def test_half_a_character_waits_for_the_rest() -> None:
    states = RegexStates("[日本]+")
    place = states.start
    for byte in "日本".encode():
        assert place is not None
        place = states.after(place, bytes([byte]))
    assert place is not None
    assert place.rest == b""
    assert states.after(place, b"\xe6") != states.after(place, b"\xe6\x97")
    assert states.after(place, b"\xff") is None
    assert states.after(place, "日".encode()[1:]) is None


@pytest.mark.parametrize(
    "pattern",
    ["(?i)a", "a*?", "[[:alpha:]]", "[a&&b]", "[a--b]", "a++", r"\bx", "(?=a)a", r"(a)\1", "(?-i:a)", "a" * 501, "("],
)
def test_what_two_parsers_may_read_differently_is_not_followed(pattern: str) -> None:
    assert RegexStates(pattern).start is None


def test_masks_of_a_pattern_that_the_library_reads_otherwise_are_forgotten() -> None:
    class Library:
        may_end = False

        def is_accepting(self) -> bool:
            return self.may_end

        def compute_ff_bytes(self) -> bytes:
            return b""

    row, library = np.arange(1, 129, dtype=np.int32), Library()
    masks = PlaceMasks("ab*", [b"", b"a", b"b"], MaskCache())
    assert masks.start is not None
    before, after = masks.start, masks.after(masks.start, 1)
    assert after is not None
    masks.put(before, row, library)
    known = masks.get(before)
    assert known is not None
    assert (known == row).all()
    masks.put(after, row, library)  # here the pattern may end, and the library says no
    assert masks.start is None
    assert masks.get(before) is None
    assert masks.get(after) is None


def test_the_latest_rows_are_kept() -> None:
    cache, row = MaskCache(max_bytes=3 * 16), np.ones(4, np.int32)
    for key in "abc":
        cache.put(key, row)
    assert cache.get("a") is not None
    cache.put("d", row)
    assert [key for key in "abcd" if cache.get(key) is None] == ["b"]


@pytest.mark.parametrize(
    ("pattern", "text"), [("(((((a?b?){9}c?){9}d?){9}e?){9}f?){9}x", b"ab"), ("a?" * 250, b"aaaa")]
)
def test_what_gets_too_costly_is_given_up(pattern: str, text: bytes) -> None:
    states = RegexStates(pattern)
    place = states.start
    for _ in range(100):
        place = place and states.after(place, text)
    assert place is None
    assert states.start is not None
    assert len(states._terms) + len(states._moves) < 10_000
