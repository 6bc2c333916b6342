"""The prefix tree against tables compared one by one, and its groups against all partitions there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv.block_pool import Block
from quire.kv.prefix_tree import PrefixGroup, PrefixTree
from tests.effort import some

Tables = dict[int, list[Block]]


class Maker:
    """Tables over blocks that are shared by their first numbers, as the prefix cache shares them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._shared: dict[tuple[int, ...], Block] = {}

    def make(self, path: list[int], own: int = 1) -> list[Block]:
        """One block a number, the same for all tables with the same beginning; then `own` blocks of its own."""
        table = []
        for end in range(1, len(path) + 1):
            key = tuple(path[:end])
            if key not in self._shared:
                self._shared[key] = Block(next(self._numbers))
            table.append(self._shared[key])
        return table + [Block(next(self._numbers)) for _ in range(own)]


def common(tables: list[list[Block]]) -> int:
    for i, blocks in enumerate(zip(*tables)):  # noqa: B905 (up to the shortest)
        if any(block is not blocks[0] for block in blocks):
            return i
    return min(map(len, tables))


def check(groups: list[PrefixGroup], tables: Tables, min_blocks: int = 1) -> None:
    """Groups are what they say."""
    seats = [seat for group in groups for seat in group.seats]
    assert len(seats) == len(set(seats)), "a seat is in two groups"
    for group in groups:
        assert len(group.seats) > 1
        assert group.num_blocks >= min_blocks
        assert common([tables[seat] for seat in group.seats]) >= group.num_blocks
    assert [g.saved for g in groups] == sorted((g.saved for g in groups), reverse=True)


def content(groups: list[PrefixGroup]) -> set[tuple[int, frozenset[int]]]:
    return {(group.num_blocks, frozenset(group.seats)) for group in groups}


def tree_of(tables: Tables, min_blocks: int = 1) -> PrefixTree:
    tree = PrefixTree(min_blocks)
    for seat, table in tables.items():
        tree.insert(seat, table)
    return tree


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for partition in partitions(rest):
        yield [[first], *partition]
        for i, part in enumerate(partition):
            yield [*partition[:i], [first, *part], *partition[i + 1 :]]


def best(tables: Tables) -> int:
    """Blocks that the best of all partitions saves."""
    return max(
        sum((len(part) - 1) * common([tables[seat] for seat in part]) for part in partition if len(part) > 1)
        for partition in partitions(list(tables))
    )


def named(*rows: str, own: int = 1) -> Tables:
    """A table a word; words that begin alike share so many blocks. Seats 1, 2, …"""
    maker = Maker()
    return {seat: maker.make([ord(c) for c in row], own) for seat, row in enumerate(rows, 1)}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((), set()),
        (("abc",), set()),
        (("abc", "xyz"), set()),
        (("abc", "abd"), {(2, frozenset({1, 2}))}),
        (("abc", "abc", "abc"), {(3, frozenset({1, 2, 3}))}),
        # Two pairs with little in common stay two pairs, with much in common they are one group.
        (("axxx", "axxx", "ayyy", "ayyy"), {(4, frozenset({1, 2})), (4, frozenset({3, 4}))}),
        (("aaax", "aaax", "aaay", "aaay"), {(3, frozenset({1, 2, 3, 4}))}),
        # One that has little in common with a pair stays alone.
        (("aaaa", "aaaa", "ab"), {(4, frozenset({1, 2}))}),
        (("abcdef", "abcdef", "apx", "aqx", "arx"), {(6, frozenset({1, 2})), (1, frozenset({3, 4, 5}))}),
    ],
)
def test_scenes_that_can_be_followed_by_hand(rows: tuple[str, ...], expected: set[tuple[int, frozenset[int]]]) -> None:
    assert content(tree_of(named(*rows)).groups()) == expected


def test_short_prefixes_are_no_groups() -> None:
    tree = tree_of(named("aab", "aac", "aad", "pqrst", "pqrsu"), min_blocks=3)
    assert content(tree.groups()) == {(4, frozenset({4, 5}))}


def test_insert_says_whether_anything_is_shared() -> None:
    tables = named("ab", "cd", "ax")
    tree = PrefixTree(1)
    assert [tree.insert(seat, table) for seat, table in tables.items()] == [False, False, True]


def test_blocks_of_equal_places_behind_different_ones_are_not_shared() -> None:
    """A request may hit a cached second block behind a first one of its own."""
    a, b, shared, x, y = (Block(i) for i in range(5))
    tree = tree_of({1: [a, shared, x], 2: [b, shared, y]})
    assert tree.groups() == []


def test_tables_may_grow() -> None:
    tables = named("abc", "abd")
    tree = tree_of(tables)
    tables[1].append(Block(98))
    tables[2].append(Block(99))
    tables[3] = [*tables[1][:3], Block(97)]
    tree.insert(3, tables[3])
    assert content(tree.groups()) == {(2, frozenset({1, 2, 3}))}
    for seat in (2, 1, 3):
        tree.remove(seat)
    assert tree.groups() == []


def test_a_chain_of_a_thousand_forks() -> None:
    """Deeper than recursion goes, and still fast."""
    tables = named(*("a" * i + "b" for i in range(1, 1001)))
    tree = tree_of(tables)
    groups = tree.groups()
    check(groups, tables)
    assert sum(group.saved for group in groups) > 499 * 500
    for seat in random.Random(0).sample(list(tables), len(tables)):
        tree.remove(seat)
    assert tree.groups() == []


paths = st.lists(st.integers(0, 2), max_size=6)


@settings(max_examples=some(300), deadline=None)
@given(st.lists(st.one_of(paths, st.integers(0, 30)), max_size=40), st.integers(1, 3))
def test_coming_and_going_leaves_the_tree_of_who_is_there(acts: list[list[int] | int], min_blocks: int) -> None:
    maker, tree, tables = Maker(), PrefixTree(min_blocks), {}
    for seat, act in enumerate(acts):
        if isinstance(act, list):
            tables[seat] = maker.make(act)
            tree.insert(seat, tables[seat])
        elif tables:
            gone = list(tables)[act % len(tables)]
            tree.remove(gone)
            del tables[gone]
        groups = tree.groups()
        check(groups, tables, min_blocks)
        assert content(groups) == content(tree_of(tables, min_blocks).groups())


@settings(max_examples=some(300), deadline=None)
@given(st.lists(paths, max_size=6))
def test_groups_save_nearly_what_can_be_saved(rows: list[list[int]]) -> None:
    maker = Maker()
    tables = {seat: maker.make(path) for seat, path in enumerate(rows, 1)}
    saved = sum(group.saved for group in tree_of(tables).groups())
    assert saved >= 0.8 * best(tables)
