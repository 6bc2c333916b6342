"""When graphs are captured: few before the first request, each of the others before the first step that wants it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from quire.worker.graphs import DecodeGraphs, DecodeSize, decode_sizes
from quire.worker.mixed_graphs import MixedGraphs, mixed_sizes, with_twins


class Steps:
    """Takes down what runs, and what is captured of it."""

    def __init__(self) -> None:
        self.ran: list[tuple[object, ...]] = []
        self.captured: list[tuple[object, ...]] = []

    def forward(self, size: object, layers: int | None) -> None:
        self.ran.append((size, layers))

    def tail(self, size: DecodeSize, filtered: bool) -> None:
        self.ran.append((size.rows, filtered))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Where a capture takes a body down, and a replay runs it."""
    made = Steps()

    def capture(body: Callable[[], None], pool: object) -> SimpleNamespace:
        assert pool == "pool"
        body()
        made.captured.append(made.ran.pop())
        return SimpleNamespace(replay=body)

    monkeypatch.setattr("quire.worker.graphs._captured", capture)
    monkeypatch.setattr("quire.worker.graphs._driver_bytes", lambda: 0)
    return made


def test_a_size_is_captured_once_and_before_its_first_step(steps: Steps) -> None:
    few, many = DecodeSize(2, False), DecodeSize(4, False)
    graphs = DecodeGraphs([many, few, DecodeSize(2, True)])
    graphs.prepare(steps.forward, steps.tail, "pool")
    assert not graphs.captured
    assert steps.ran == [
        (many, 1), (4, False), (4, True), (few, 1), (2, False), (2, True), (DecodeSize(2, True), 1)
    ]  # fmt: skip
    steps.ran.clear()
    graphs.capture([few], steps.forward, steps.tail)
    assert graphs.captured
    assert not steps.ran  # of what steps read and write nothing was touched
    assert steps.captured == [(few, None), (2, False), (2, True)]
    graphs.capture([few], steps.forward, steps.tail)
    assert len(steps.captured) == 3
    graphs.forward(few)
    graphs.tail(few, filtered=True)
    assert steps.ran == [(few, None), (2, True)]
    assert graphs.missing == [many, DecodeSize(2, True)]
    graphs.capture(graphs.missing, steps.forward, steps.tail)
    assert not graphs.missing
    assert steps.captured[3:] == [(many, None), (4, False), (4, True), (DecodeSize(2, True), None)]


def test_few_sizes_are_captured_early_the_largest_among_them() -> None:
    decode = DecodeGraphs(decode_sizes([1, 2, 4, 8, 16, 32], True, adapted=True))
    assert {size.rows for size in decode.wanted_early()} == {1, 2, 4, 8, 16, 32}
    assert not any(size.shares_prefix for size in decode.wanted_early())
    mixed = MixedGraphs(with_twins(mixed_sizes(256, 8192, 10**9, 28), prefixes=True, adapters=True))
    assert mixed.wanted_early() == [max(mixed.sizes, key=lambda size: size.tokens)]
    for graphs in (decode, mixed):
        assert graphs.wanted_early()[0] == graphs.sizes[0]
