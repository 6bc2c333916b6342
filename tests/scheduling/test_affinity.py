"""Who has computed how much of a text's beginning: against sets of the beginnings themselves."""

from __future__ import annotations

import random

from quire.router.prompt import ENDS
from quire.scheduling.affinity import Affinity, chain


def test_it_finds_the_longest_beginning_that_each_place_has() -> None:
    dice = random.Random(1)
    affinity: Affinity[int] = Affinity(10_000)
    had: dict[int, set[bytes]] = {}
    ends = range(4, 65, 4)
    for _ in range(400):
        text = bytes(dice.choice(b"ab") for _ in range(dice.randrange(64)))
        hashes = chain(text, ends)
        assert len(hashes) == len(text) // 4
        wanted = {}
        for place, beginnings in had.items():
            depth = next((d for d in range(len(hashes), 0, -1) if text[: 4 * d] in beginnings), 0)
            if depth:
                wanted[place] = depth
        assert affinity.find(hashes) == wanted
        place = dice.randrange(4)
        affinity.note(hashes, place)
        had.setdefault(place, set()).update(text[:end] for end in ends if end <= len(text))
    affinity.forget(2)
    assert 2 not in affinity.find(chain(b"a" * 64, ends))


def test_the_least_recently_used_go_first_and_of_a_text_its_end() -> None:
    affinity: Affinity[str] = Affinity(6)
    one, two = (chain(text * 16, range(4, 17, 4)) for text in (b"a", b"b"))
    affinity.note(one, "x")
    affinity.note(two, "x")
    assert len(affinity) == 6
    assert affinity.find(one) == {"x": 2}
    assert affinity.find(two) == {"x": 4}


def test_pieces_of_a_prompt_rise_and_grow_with_what_is_before_them() -> None:
    lengths = [end - start for start, end in zip((0, *ENDS), ENDS, strict=False)]
    assert lengths == sorted(lengths)
    assert all(length <= max(128, start // 8) for start, length in zip((0, *ENDS), lengths, strict=False))
    assert len(ENDS) <= 105
