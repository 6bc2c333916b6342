"""Shared prefixes on the worker's side: groups cut into tiles, arrays on the device, and nothing sent without need."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attention.base import SharedPrefix, prefix_tile_rows, prefix_tiles
from quire.types.plan import NewBlocks, SharedPrefixes, StepPlan
from quire.worker import prefixes
from quire.worker.batch import Batch, BatchBuilder
from quire.worker.graphs import decode_sizes, graph_rows
from quire.worker.prefixes import PrefixLayout, PrefixRows
from quire.worker.seats import DeviceSeats
from quire.worker.staging import Staging

CPU = torch.device("cpu")
MAX_ROWS = 90
Groups = list[tuple[int, list[int]]]  # shared tokens, seats


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def shared(groups: Groups) -> SharedPrefixes:
    starts = np.cumsum([0, *(len(seats) for _, seats in groups)])
    seats = [seat for _, seats in groups for seat in seats]
    return SharedPrefixes(ints(seats), starts.astype(np.int32), ints([tokens for tokens, _ in groups]))


def plan(
    decodes: list[int], told: Groups | None = None, *, releases: tuple[int, ...] = (), chunk: int | None = None
) -> StepPlan:
    """Decode rows in these seats, and a prompt chunk of 3 tokens in seat `chunk`."""
    seats = decodes if chunk is None else [*decodes, chunk]
    tokens = [1] * len(decodes) + [3] * (chunk is not None)
    return StepPlan(
        step=0,
        admits=[],
        seats=ints(seats),
        num_tokens=ints(tokens),
        num_decodes=len(decodes),
        token_ids=ints([5] * 3 * (chunk is not None)),
        samples=np.ones(len(seats), dtype=bool),
        blocks=[NewBlocks(ints([]), ints([]), ints([]))],
        max_seq_len=64,
        releases=list(releases),
        prefixes=None if told is None else shared(told),
    )


def lay_out(rows: PrefixRows, step: StepPlan) -> PrefixLayout | None:
    rows.take(step)
    return rows.layout(step.seats[: step.num_decodes])


def groups_of(seats: list[int], tokens_of_row: list[int], members: list[int], tiles: list[list[int]]) -> Groups:
    """What a kernel would read: each tile's shared tokens and seats."""
    found = []
    for leader, first, count, tokens in tiles:
        if count:
            rows = members[first : first + count]
            assert leader in [seats[row] for row in rows]
            assert {tokens_of_row[row] for row in rows} == {tokens}
            found.append((tokens, [seats[row] for row in rows]))
    placed = [seat for _, seats in found for seat in seats]
    assert len(placed) == len(set(placed)) == sum(tokens > 0 for tokens in tokens_of_row)
    return found


def read(layout: PrefixLayout | None, seats: list[int]) -> Groups:
    assert layout is not None
    return groups_of(seats, layout.tokens_of_row.tolist(), layout.members.tolist(), layout.tiles.tolist())


def test_rows_of_a_group_in_a_tile_and_others_in_none() -> None:
    rows = PrefixRows(9, 4)
    layout = lay_out(rows, plan([1, 2, 4, 5, 7], [(32, [7, 2]), (16, [1, 3, 5])]))
    assert read(layout, [1, 2, 4, 5, 7]) == [(32, [2, 7]), (16, [1, 5])]
    assert layout is not None
    assert layout.tokens_of_row.tolist() == [16, 32, 0, 16, 32]


def test_a_large_group_is_cut_into_tiles_of_about_one_size() -> None:
    size = prefix_tile_rows(4)
    seats = list(range(1, 2 * size + 2))
    layout = lay_out(PrefixRows(len(seats), 4), plan(seats, [(16, seats)]))
    found = read(layout, seats)
    assert [seat for _, members in found for seat in members] == seats
    counts = [len(members) for _, members in found]
    assert len(counts) == 3
    assert max(counts) - min(counts) <= 1


def test_who_is_alone_in_this_step_shares_nothing() -> None:
    rows = PrefixRows(9, 4)
    assert lay_out(rows, plan([1, 2, 3], [(16, [1, 4]), (16, [2, 5])])) is None
    assert read(lay_out(rows, plan([1, 2, 4])), [1, 2, 4]) == [(16, [1, 4])]
    assert read(lay_out(rows, plan([1, 2, 4, 5])), [1, 2, 4, 5]) == [(16, [1, 4]), (16, [2, 5])]


def test_a_released_seat_has_left_its_group_and_new_groups_replace_all() -> None:
    rows = PrefixRows(9, 4)
    lay_out(rows, plan([1, 2, 3], [(16, [1, 2, 3])]))
    assert read(lay_out(rows, plan([2, 3], releases=(1,))), [2, 3]) == [(16, [2, 3])]
    assert read(lay_out(rows, plan([1, 2, 3])), [1, 2, 3]) == [(16, [2, 3])]
    assert read(lay_out(rows, plan([1, 2, 3], [(48, [1, 3])])), [1, 2, 3]) == [(48, [1, 3])]
    assert lay_out(rows, plan([1, 2, 3], [])) is None


def test_the_same_rows_give_the_same_object() -> None:
    rows = PrefixRows(9, 4)
    first = lay_out(rows, plan([1, 2, 3], [(16, [1, 2])]))
    assert lay_out(rows, plan([1, 2, 3])) is first
    assert lay_out(rows, plan([1, 2])) is not first
    assert lay_out(rows, plan([1, 2, 3], [(16, [1, 2])])) is not first


@pytest.mark.parametrize("room", [1, 2, 3])
def test_groups_for_which_there_is_no_tile_are_left_out(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(prefixes, "prefix_tiles", lambda rows, group: room)  # noqa: ARG005
    size = prefix_tile_rows(4)
    told = [(64, list(range(1, size + 2))), (32, [60, 61]), (16, [70, 71])]
    seats = [seat for _, seats in told for seat in seats]
    layout = lay_out(PrefixRows(MAX_ROWS, 4), plan(seats, told))
    found = [tokens for tokens, _ in read(layout, seats)] if layout else []
    assert found == {1: [], 2: [64, 64], 3: [64, 64, 32]}[room]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 4, 7, 64]), st.integers(1, 40))
def test_any_groups_in_any_step(seed: int, group: int, num_groups: int) -> None:
    """Every group of two or more present rows is there, unless the tiles are full."""
    rng = np.random.default_rng(seed)
    told: Groups = [(16 * (i + 1), []) for i in range(num_groups)]
    for seat in rng.permutation(np.arange(1, MAX_ROWS + 1))[: rng.integers(MAX_ROWS)].tolist():
        told[rng.integers(num_groups)][1].append(seat)
    seats = [seat for seat in range(1, MAX_ROWS + 1) if rng.random() < 0.7] or [1]
    layout = lay_out(PrefixRows(MAX_ROWS, group), plan(seats, told))
    here = [(tokens, sorted(set(members) & set(seats))) for tokens, members in told]
    wanted = {tokens: members for tokens, members in here if len(members) > 1}
    found: dict[int, list[int]] = {}
    for tokens, members in read(layout, seats) if layout else []:
        assert len(members) <= prefix_tile_rows(group)
        found.setdefault(tokens, []).extend(members)
    for tokens, members in found.items():
        assert sorted(members) == wanted[tokens]
    bound = prefix_tiles(len(seats), group)
    needed = sum(-(-len(members) // prefix_tile_rows(group)) for members in wanted.values())
    if needed <= bound:
        assert found.keys() == wanted.keys()
    if layout:
        assert len(layout.tiles) <= bound


# --- the arrays that a step gets ------------------------------------------------------------------------------------


class Counted(Staging):
    def __init__(self) -> None:
        super().__init__(4096, CPU)
        self.num_sent = 0

    def send(self) -> None:
        self.num_sent += 1
        super().send()


class Bench:
    """A builder whose steps come with any size."""

    def __init__(self, group: int = 4) -> None:
        seats = DeviceSeats(MAX_ROWS, 8, torch.zeros(64, dtype=torch.int32), 16, CPU)
        self.builder = BatchBuilder(seats, PrefixRows(MAX_ROWS, group), MAX_ROWS, 256, 128, CPU)
        self.staging = Counted()

    def decode(self, step: StepPlan, size: int = 0) -> Batch:
        layout = self.builder.layout(step)
        return self.builder.decode(step, size or step.num_rows, layout, self.staging)

    def mixed(self, step: StepPlan) -> Batch:
        return self.builder.mixed(step, self.builder.layout(step), self.staging)


def seen(batch: Batch) -> Groups:
    prefix = batch.attention.prefix
    assert isinstance(prefix, SharedPrefix)
    rows = batch.attention.num_decodes
    assert prefix.tokens_of_row.shape == prefix.members.shape == (rows,)
    assert prefix.tiles.shape == (prefix_tiles(rows, 4), 4)
    assert {t.dtype for t in (prefix.tokens_of_row, prefix.members, prefix.tiles)} == {torch.int32}
    arrays = (prefix.tokens_of_row, prefix.members, prefix.tiles)
    assert all(t.is_contiguous() and t.storage_offset() % 4 == 0 for t in arrays), "kernels rely on aligned arrays"
    seats = batch.attention.seats[:rows].tolist()
    return groups_of(seats, *(t.tolist() for t in arrays))


def test_a_steady_batch_sends_nothing() -> None:
    bench = Bench()
    told = [(32, [2, 5]), (16, [1, 3])]
    assert seen(bench.decode(plan([1, 2, 3, 5], told), 8)) == told
    assert bench.staging.num_sent == 1
    for _ in range(3):
        assert seen(bench.decode(plan([1, 2, 3, 5]), 8)) == told
    assert bench.staging.num_sent == 1


def test_rows_and_groups_that_change_are_sent() -> None:
    bench = Bench()
    bench.decode(plan([1, 2, 3, 4, 5], [(16, [1, 2, 3, 4, 5])]), 8)
    batch = bench.decode(plan([1, 2, 5], releases=(3, 4)), 4)
    assert batch.seats.tolist() == [1, 2, 5, 0]
    assert seen(batch) == [(16, [1, 2, 5])]
    assert seen(bench.decode(plan([1, 2, 5], [(48, [2, 5])]), 4)) == [(48, [2, 5])]
    assert bench.staging.num_sent == 3
    assert bench.decode(plan([1, 2, 5], []), 4).attention.prefix is None
    assert bench.staging.num_sent == 3


def test_a_step_without_groups_knows_of_none_and_the_next_one_does_again() -> None:
    bench = Bench()
    told = [(16, [1, 2])]
    bench.decode(plan([1, 2, 3], told))
    assert bench.decode(plan([1, 3])).attention.prefix is None
    assert seen(bench.decode(plan([1, 2, 3]))) == told


def test_decode_rows_beside_a_prompt_share_too() -> None:
    bench = Bench()
    told = [(32, [2, 5]), (16, [1, 3])]
    batch = bench.mixed(plan([1, 2, 3, 5], told, chunk=7))
    assert seen(batch) == told
    assert seen(bench.decode(plan([1, 2, 3, 5]), 8)) == told
    assert bench.mixed(plan([1, 2], chunk=7)).attention.prefix is None


def test_graphs_see_what_the_steps_have_put_there() -> None:
    bench = Bench()
    graph = bench.builder.decode_views(8, shares_prefix=True)
    bench.decode(plan([1, 2, 3], [(16, [1, 3])]), 8)
    assert seen(graph) == [(16, [1, 3])]
    assert bench.builder.decode_views(8).attention.prefix is None


def test_an_attention_that_does_not_know_prefixes_gets_none() -> None:
    seats = DeviceSeats(MAX_ROWS, 8, torch.zeros(64, dtype=torch.int32), 16, CPU)
    builder = BatchBuilder(seats, None, MAX_ROWS, 256, 128, CPU)
    step = plan([1, 2, 3], [(16, [1, 3])])
    assert builder.layout(step) is None
    assert builder.decode(step, 3, None, Counted()).attention.prefix is None


@pytest.mark.parametrize("top", [1, 3, 8, 64, 256, 1000])
def test_graph_sizes_for_prefixes_are_few_and_cover_every_batch(top: int) -> None:
    sizes = graph_rows(top, [])
    chosen = [s.rows for s in decode_sizes(sizes, True) if s.shares_prefix][::-1]
    assert set(chosen) <= set(sizes)
    assert chosen[-1] == sizes[-1]
    assert len(chosen) <= 12
    for rows in range(9, sizes[-1] + 1):
        assert next(size for size in chosen if size >= rows) <= max(16, 2 * rows)
