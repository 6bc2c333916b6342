"""Sums over ranks of a prompt step's rows, under way while products run.

Products fill every processor, and so does a sum; one after the other, each waits for the other's end. Here what is
added up travels by the copy engines, which no product misses: a piece of rows goes, in shares, to the ranks that add
them up, and from there to all. Streams wait for words in their own memory that others write behind what they send, so
nothing waits on a processor, either. While one piece is on its way, products of the others run.

The step's residual stream lies in memory of this module (`hold`), so that what comes in lands in its place. Rows that
`begin` was called for are nobody's until `pieces` or `finish` hands them out again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist

from quire.distributed.topology import Topology

Add = Callable[[int, int, int, int, int], None]
"""f(own, parts, residual, count, stream), the first three addresses: `count` numbers of the residual get this rank's
own, and the parts of the others."""
MakeAdd = Callable[[torch.dtype, int, int, int, torch.device], Add | None]
"""f(dtype, stride, rank, size, device): numbers of rank r begin r * stride behind `parts`. None: no kernels run yet."""
MOST_PIECES = 2  # of a step: while one's sum is on its way the other's products and attention run
LEAST_OPERATIONS = 8.5e11  # of a piece in a layer, 1.3 ms: the host must keep up, which needs some 1.2 to launch one
OPERATIONS_A_BYTE = 1750  # that a product does while links carry one: 650 TFLOP/s, 370 GB/s
_SUMS = 2  # of a layer
_EVEN = 256  # rows, of whose multiples pieces are: tiles of products
_PLACES = 3  # pieces on their way to a rank at a time
_ALIGNED = 256


@dataclass(frozen=True, slots=True)
class Steps:
    """Those whose sums are to be under way. The same on every rank.

    hidden, dtype: of the residual stream. max_rows: of a step. operations: of a row in a layer, on one rank.
    """

    size: int
    hidden: int
    dtype: torch.dtype
    max_rows: int
    operations: int

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    @property
    def fewest_rows(self) -> int:
        """Of a piece. Sums count for what they would take if nothing hid them."""
        sums = _SUMS * self.row_bytes * 2 * (self.size - 1) / self.size
        return int(LEAST_OPERATIONS / (self.operations + sums * OPERATIONS_A_BYTE)) + 1

    def piece_rows(self, rows: int) -> int:
        """Of every piece but the last of a step; `rows`: it has one piece, and nothing would be under way."""
        count = min(MOST_PIECES, rows // self.fewest_rows)
        return rows if count < 2 else min(rows, -(-rows // (count * _EVEN)) * _EVEN)

    @property
    def share(self) -> int:
        """Rows of a piece, at most, that one rank adds up."""
        piece = max(self.max_rows / MOST_PIECES, 1.5 * self.fewest_rows) + _EVEN
        return -(-min(self.max_rows, int(piece)) // self.size)

    def offsets(self) -> dict[str, int]:
        """Bytes before each part of a rank's memory, and before its end ("")."""
        sizes = {
            "rows": self.max_rows * self.row_bytes,
            "parts": _PLACES * self.size * self.share * self.row_bytes,
            "words": 4 * (1 + 2 * self.size),
        }
        aligned = (-(-count // _ALIGNED) * _ALIGNED for count in sizes.values())
        return dict(zip((*sizes, ""), accumulate(aligned, initial=0), strict=True))


class SumsUnderWay:
    """Of one rank: which rows are on their way; how they travel is `Travel`'s. All ranks make the same calls in the
    same order."""

    def __init__(self, steps: Steps, rows: torch.Tensor, travel: Travel) -> None:
        """rows [steps.max_rows, hidden]: where the residual stream of a step lies, and `travel` puts sums."""
        self.steps, self._rows, self._travel = steps, rows, travel
        self._cut = steps.max_rows
        self._begun: list[_Begun] = []

    def takes(self, residual: torch.Tensor) -> bool:
        """Whether a step of these rows gains by it."""
        count, steps = len(residual), self.steps
        return residual.dtype == steps.dtype and steps.piece_rows(count) < count <= steps.max_rows

    def hold(self, residual: torch.Tensor) -> torch.Tensor:
        """A copy of a step's residual stream, for as long as the step lasts."""
        self._cut = self.steps.piece_rows(len(residual))
        return self._rows[: len(residual)].copy_(residual)

    def holds(self, residual: torch.Tensor) -> bool:
        """Whether these are rows of what `hold` has returned."""
        first = self._rows.data_ptr()
        return first <= residual.data_ptr() < first + self._rows.nbytes

    def cut(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Any rows of the step, from the beginning of a piece on, in pieces."""
        found: tuple[torch.Tensor, ...] = rows.split(self._cut)
        return found

    def begin(self, partial: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual += the sum of all ranks' partial`, [m, hidden] of rows that are held; returns it at once.

        In float32, in the order of ranks, and rounded once. `partial` must not be written any more.
        """
        for part, rows in zip(self.cut(partial.contiguous()), self.cut(residual), strict=True):
            first = (rows.data_ptr() - self._rows.data_ptr()) // self.steps.row_bytes
            self._begun.append(_Begun(first, first + len(part), self._travel.begin(part, first), part))
        return residual

    def pieces(self, residual: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """The rows of each piece and which they are, when all that was begun is there."""
        first = 0
        for rows in self.cut(residual):
            self.finish(rows)
            yield slice(first, first + len(rows)), rows
            first += len(rows)

    def finish(self, residual: torch.Tensor) -> torch.Tensor:
        """The same rows, as they are when all that was begun is there."""
        first = (residual.data_ptr() - self._rows.data_ptr()) // self.steps.row_bytes
        last = first + len(residual)
        due = max((one.number for one in self._begun if one.first < last and first < one.last), default=None)
        if due is not None:  # pieces arrive in the order of their numbers
            self._travel.finish(due)
            self._begun = [one for one in self._begun if one.number > due]
        return residual


class _Begun(NamedTuple):
    first: int
    last: int
    number: int
    partial: torch.Tensor  # kept for those who still read it


class Travel:
    """Of pieces between the GPUs of a host, from memory to memory."""

    def __init__(
        self, steps: Steps, topology: Topology, make_add: MakeAdd, local: torch.Tensor, bases: list[int]
    ) -> None:
        """local: this rank's memory, uint8, all zeros; bases: where this process finds each rank's."""
        offsets, rank, size = steps.offsets(), topology.rank, topology.size
        self._steps, self._rank, self._size, self._device = steps, rank, size, local.device
        self.rows = local[: steps.max_rows * steps.row_bytes].view(steps.dtype).view(steps.max_rows, steps.hidden)
        self._driver = _driver()
        self._sending, self._adding = torch.cuda.Stream(self._device, -1), torch.cuda.Stream(self._device, -1)
        self._number = self._finished = 0
        self._others = [(rank + ahead) % size for ahead in range(1, size)]  # not all write to the same one first
        self._bases = bases
        self._parts = [base + offsets["parts"] for base in bases]
        words = [base + offsets["words"] for base in bases]
        # Words say the number of the last piece: that this rank has made, and that each has sent to it, and added up.
        self._made = words[rank]
        self._sent = [[word + 4 * (1 + other) for other in range(size)] for word in words]
        self._added = [[word + 4 * (1 + size + other) for other in range(size)] for word in words]
        self._make_add = make_add
        self._add: Add | None = None

    @classmethod
    def on_gpu(
        cls, steps: Steps, topology: Topology, make_add: MakeAdd, device: torch.device, ranks: dist.ProcessGroup
    ) -> Travel:
        """All ranks call it together; they can write each other's memory."""
        import torch.distributed._symmetric_memory as symmetric_memory

        local = symmetric_memory.empty(steps.offsets()[""], dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(local, ranks)
        local.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group=ranks)  # nobody writes before all have their zeros
        travel = cls(steps, topology, make_add, local, [int(pointer) for pointer in handle.buffer_ptrs])
        travel._handle = handle  # type: ignore[attr-defined]  # the mappings live as long as it
        return travel

    def begin(self, partial: torch.Tensor, first: int) -> int:
        """Add partial [m, hidden] of all ranks to the rows from `first` on; returns the piece's number."""
        driver, rank, number = self._driver, self._rank, self._number + 1
        self._number = number
        stream = torch.cuda.current_stream(self._device).cuda_stream
        sending, adding = self._sending.cuda_stream, self._adding.cuda_stream
        row_bytes, count, source = self._steps.row_bytes, len(partial), partial.data_ptr()
        share, place = -(-count // self._size), number % _PLACES
        driver.write(stream, self._made, number)
        driver.wait(sending, self._made, number)
        for other in self._others:
            begin, end = min(other * share, count), min(other * share + share, count)
            if number - _PLACES > self._finished:
                driver.wait(sending, self._added[rank][other], number - _PLACES)  # then the place is empty again
            driver.copy(self._place(other, place, rank), source + begin * row_bytes, (end - begin) * row_bytes, sending)
            driver.write(sending, self._sent[other][rank], number)
        driver.wait(adding, self._made, number)
        for other in self._others:
            driver.wait(adding, self._sent[rank][other], number)
        begin, end = min(rank * share, count), min(rank * share + share, count)
        at = (first + begin) * row_bytes
        if self._add is None:
            steps = self._steps
            self._add = self._make_add(steps.dtype, steps.share * steps.hidden, rank, self._size, self._device)
        if begin < end and self._add is not None:
            own, parts = source + begin * row_bytes, self._place(rank, place, 0)
            self._add(own, parts, self._bases[rank] + at, (end - begin) * self._steps.hidden, adding)
        for other in self._others:
            driver.copy(self._bases[other] + at, self._bases[rank] + at, (end - begin) * row_bytes, adding)
            driver.write(adding, self._added[other][rank], number)
        driver.write(adding, self._added[rank][rank], number)
        return number

    def finish(self, number: int) -> None:
        """The current stream goes on when that piece, and all before it, are where they belong."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for word in self._added[self._rank]:
            self._driver.wait(stream, word, number)
        self._finished = number

    def _place(self, of: int, place: int, source: int) -> int:
        """Where rank `of` has what rank `source` sends it."""
        lines = (place * self._size + source) * self._steps.share
        return self._parts[of] + lines * self._steps.row_bytes


class _Driver:
    """What CUDA's driver can tell a stream to do without a kernel. Addresses and streams are numbers."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, word = ctypes.c_uint64, ctypes.c_uint32
        self._wait, self._write = library.cuStreamWaitValue32_v2, library.cuStreamWriteValue32_v2
        self._copy = library.cuMemcpyDtoDAsync_v2
        self._wait.argtypes = self._write.argtypes = [pointer, pointer, word, ctypes.c_uint]
        self._copy.argtypes = [pointer, pointer, ctypes.c_size_t, pointer]

    def wait(self, stream: int, address: int, number: int) -> None:
        """Until the word at `address` has come as far as `number`, as signed differences say: they may pass 2^31."""
        _check(self._wait(stream, address, number & 0xFFFFFFFF, 0))  # 0: greater or equal

    def write(self, stream: int, address: int, number: int) -> None:
        """When all that the stream was told before is done, and others can see it."""
        _check(self._write(stream, address, number & 0xFFFFFFFF, 0))

    def copy(self, into: int, source: int, count: int, stream: int) -> None:
        """`count` bytes."""
        if count:
            _check(self._copy(into, source, count, stream))


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"CUDA's driver refuses what a stream was told to do: error {error}")


@cache
def _driver() -> _Driver:
    return _Driver()
