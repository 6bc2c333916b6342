"""CUDA graphs of steps: each size of a ladder is captured once, before its first step, and replayed with nothing copied
in.

A step is two graphs: the forward pass (gather … logits) and a tail (sample, commit), of which there are two: with and
without top-k, top-p and min-p. Between them is the one place where a feature that only some steps need (penalties,
log-probabilities, a grammar's mask) can act.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from quire.foundation.heap import no_collection

MIN_PREFIX_SIZE = 8
_TIMED = 2  # steps whose mean is taken


class Size(Hashable, Protocol):
    """What a graph has room for."""

    @property
    def rows(self) -> int: ...


AnySize = TypeVar("AnySize", bound=Size)
Forward = Callable[[AnySize, int | None], None]
Tail = Callable[[AnySize, bool], None]


class StepGraphs(Generic[AnySize]):
    """Graphs of one kind of step: a forward pass a size, and two tails a number of rows.

    sizes: falling. What they hold is told when they are captured and not kept, so that no graph holds its runner.
    forward(size, layers): everything from gather to logits; tail(size, filtered): sampling and commit, which looks at
    nothing of a size but its rows.
    """

    def __init__(self, sizes: Iterable[AnySize]) -> None:
        self.sizes = list(sizes)
        self._forwards: dict[AnySize, torch.cuda.CUDAGraph] = {}
        self._tails: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self.driver_bytes = 0  # that the driver has taken for them and their kernels, and keeps when they are gone

    @property
    def captured(self) -> bool:
        """Whether any is: then all others can be."""
        return bool(self._forwards)

    @property
    def missing(self) -> list[AnySize]:
        """Sizes that are not captured yet, falling."""
        return [size for size in self.sizes if size not in self._forwards]

    def wanted_early(self) -> list[AnySize]:
        """Sizes that are captured before the first request comes, falling; the largest is one, so that the memory that
        all of them share is taken while it is there for sure."""
        return self.sizes

    def prepare(self, forward: Forward[AnySize], tail: Tail[AnySize], pool: Any) -> None:
        """What captures forbid, loading matrix algorithms and whatever was not compiled ahead, is done here for all
        sizes, with one layer of each make alone: their kernels are alike. pool: whose memory captures will take."""
        self._pool = pool
        before = _driver_bytes()
        rows: set[int] = set()
        for size in self.sizes:
            forward(size, 1)
            if size.rows not in rows:
                rows.add(size.rows)
                for filtered in (False, True):
                    tail(size, filtered)
        self.driver_bytes += max(0, _driver_bytes() - before)

    def capture(self, sizes: Iterable[AnySize], forward: Forward[AnySize], tail: Tail[AnySize]) -> None:
        """Capture those of `sizes` that are missing, on the current stream, where earlier steps may still run. The
        largest comes first, for the smaller ones to reuse its memory. Nothing that a step reads or writes is touched.
        """
        for size in sizes:
            if size in self._forwards:
                continue
            before = _driver_bytes()
            with no_collection():  # one inside a capture could free device memory and break it
                graph = _captured(partial(forward, size, None), self._pool)
                for filtered in (False, True):
                    if (size.rows, filtered) not in self._tails:
                        self._tails[size.rows, filtered] = _captured(partial(tail, size, filtered), self._pool)
                self._forwards[size] = graph
            self.driver_bytes += max(0, _driver_bytes() - before)

    def rehearse(self, forward: Forward[AnySize], tail: Tail[AnySize]) -> None:
        """Launch, outside of graphs, every kernel variant that they will hold."""
        for size in self._rehearsed():
            forward(size, 1)
            for filtered in (False, True):
                tail(size, filtered)

    def _rehearsed(self) -> Iterable[AnySize]:
        """Sizes that have all kernel variants among them."""
        return self.sizes

    def seconds(self, size: AnySize) -> float:
        """That a step takes, in whatever state the device's memory is. Waits."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for repeat in range(_TIMED + 1):
            if repeat == 1:  # the first warms up
                begin.record()
            self.forward(size)
            self.tail(size, filtered=False)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / _TIMED

    def forward(self, size: AnySize) -> None:
        self._forwards[size].replay()

    def tail(self, size: AnySize, *, filtered: bool) -> None:
        self._tails[size.rows, filtered].replay()


class CapturedSteps(Protocol):
    """Steps of one kind, and their graphs."""

    graphs: StepGraphs[Any]

    def forward(self, size: Any, layers: int | None) -> None:
        """What a forward graph holds; layers: see `StepGraphs`."""
        ...

    def tail(self, size: Any, filtered: bool) -> None:
        """What a tail graph holds."""
        ...


def _captured(body: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """What `body` launches. Graphs of one pool share its memory: they must run one after another."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        body()
    finally:
        graph.capture_end()
    return graph


def _driver_bytes() -> int:
    """Memory of the current device that is taken, but not by this process's tensors."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class DecodeSize(NamedTuple):
    rows: int
    shares_prefix: bool  # some rows begin with the same blocks, which are read once
    adapted: bool = False  # some rows have LoRA adapters


class DecodeGraphs(StepGraphs[DecodeSize]):
    """Steps of decode rows only."""

    def size_for(self, rows: int, shares_prefix: bool, *, adapted: bool = False) -> DecodeSize | None:
        """The smallest captured size that holds `rows`; None if none does."""
        found = None
        for size in self.sizes:
            if size.shares_prefix == shares_prefix and size.adapted == adapted:
                if size.rows < rows:
                    break
                found = size
        return found

    def wanted_early(self) -> list[DecodeSize]:
        """Those of rows that have nothing in common: they come with every batch that grows or shrinks."""
        return [size for size in self.sizes if not size.shares_prefix]

    def _rehearsed(self) -> Iterable[DecodeSize]:
        return [size for size in self.sizes if size.rows.bit_count() == 1 or size.rows == self.sizes[0].rows]


class DraftedSize(NamedTuple):
    rows: int
    adapted: bool = False  # some of them have LoRA adapters


class DraftedGraphs(StepGraphs[DraftedSize]):
    """Steps of decode rows that bring drafts."""

    def size_for(self, rows: int, *, adapted: bool = False) -> DraftedSize | None:
        """The smallest captured size that holds `rows`; None if none does."""
        fitting = (size for size in reversed(self.sizes) if size.rows >= rows and size.adapted == adapted)
        return next(fitting, None)


def drafted_sizes(max_rows: int, width: int, *, adapted: bool = False) -> list[DraftedSize]:
    """Sizes to capture, falling, of rows with so many tokens each: they fill what products have kernels for.

    adapted: beside each its twin for rows with adapters.
    """
    tokens = (*_heights(128), 192, 256, 384, 512, 768, 1024)
    rows = {1, max_rows, *(count // width for count in tokens)}
    counts = [count for count in sorted(rows, reverse=True) if 0 < count <= max_rows]
    return [DraftedSize(count, twin) for count in counts for twin in ((False, True) if adapted else (False,))]


def _heights(most: int) -> list[int]:
    """Of tiles."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def decode_sizes(rows: list[int], prefix_support: bool, *, adapted: bool = False) -> list[DecodeSize]:
    """Sizes to capture, falling, of rising numbers of rows. For rows that share prefixes fewer, a third apart or so.

    adapted: for rows with adapters as many.
    """
    sizes = []
    last = 0
    for count in reversed(rows):
        sizes.append(DecodeSize(count, shares_prefix=False))
        if adapted:
            sizes.append(DecodeSize(count, shares_prefix=False, adapted=True))
        if prefix_support and (not last or (count >= MIN_PREFIX_SIZE and 4 * count <= 3 * last)):
            sizes.append(DecodeSize(count, shares_prefix=True))
            last = count
    return sizes


def graph_rows(max_rows: int, wanted: list[int]) -> list[int]:
    """Numbers of decode rows to capture, rising.

    Up to 128 these are the heights of tiles that products have kernels for (`kernels/gemm/triton/plan.py`): numbers
    between two of them take as long as the next, or longer. From there on they are numbers that the library has good
    kernels for, and padding wastes at most a third.
    """
    if wanted:
        return sorted({count for count in wanted if 0 < count <= max_rows})
    counts, count = {max_rows}, 1
    while count < max_rows:
        counts.add(count)
        count += count if count < 128 else 32 if count < 256 else 64 if count < 384 else 128
    return sorted(counts)
