"""Bytes of files into tensors, several threads at once: straight there on a CPU, through pinned memory to a GPU.

One thread copies out of the page cache at a fraction of what memory and bus give; reads leave the interpreter's lock.

Where a target is part of a matrix that is packed once all of it has been read, the thread that reads the last piece
packs it. What is staged for that is allocated and freed on one stream of its own, so that its memory is used over and
over.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quire.layers.targets import Staging, Target
from quire.models.safetensors_file import Entry, TensorFile
from quire.platforms.transfers import pins

CHUNK_BYTES = 16 * 1024**2
MAX_THREADS = 8


class Read(NamedTuple):
    """A stored tensor and a place for it, or for a part of it."""

    file: TensorFile
    entry: Entry
    target: Target

    def num_bytes(self) -> int:
        """That are read of it: whole lines of the first dimension that is cut."""
        return sum((lines.end - lines.begin) * self.line_bytes(lines) for lines in _parts(self))

    def line_bytes(self, lines: _Lines) -> int:
        return math.prod(self.entry.shape[len(lines.inside) + 1 :]) * self.entry.dtype.itemsize


class _Lines(NamedTuple):
    """[begin, end) of a stored tensor along one dimension, inside of `inside` of the dimensions before it, and where
    they go: `at` of the target's memory."""

    inside: tuple[int, ...]
    begin: int
    end: int
    at: tuple[int | slice, ...]


class Piece(NamedTuple):
    read: Read
    lines: _Lines
    job: Job | None
    total: torch.Tensor  # float32 scalar on the target's device: finite if all that has been read is


@dataclass(slots=True)
class Job:
    """A matrix that is packed when the last of its pieces is there."""

    staging: Staging
    left: int = 0
    arrived: list[torch.cuda.Event] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_down(self, event: torch.cuda.Event | None) -> bool:
        """Whether that was the last."""
        with self.lock:
            if event is not None:
                self.arrived.append(event)
            self.left -= 1
            return not self.left


class NotFiniteError(Exception):
    """The tensor `source` holds NaN or infinities, or becomes such in the model's dtype."""

    def __init__(self, source: str) -> None:
        super().__init__("not finite")
        self.source = source


class Lane:
    """What one thread reads through: two staging buffers, one filled while the other is on its way to the device."""

    def __init__(self, device: torch.device, packing: torch.cuda.Stream | None, in_place: bool | None = None) -> None:
        """in_place: files are read straight into a target that is as they have it; None: on a CPU."""
        self._on_gpu = pins(device)
        self._in_place = device.type == "cpu" if in_place is None else in_place
        self._packing = packing
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._buffers: list[torch.Tensor] = []
        self._sent: list[torch.cuda.Event] = []
        self._turn = 0

    def fill(self, piece: Piece) -> int:
        """Returns the bytes read. Raises MalformedFileError, OSError."""
        (file, entry, _), (index, begin, end, _) = piece.read, piece.lines
        memory = self._memory(piece)
        shape = (end - begin, *entry.shape[len(index) + 1 :])
        line, first = piece.read.line_bytes(piece.lines), 0
        for length, place in zip(entry.shape, (*index, begin), strict=False):
            first = first * length + place
        offset, count = entry.start + first * line, (end - begin) * line
        if self._in_place and memory.dtype == entry.dtype and memory.shape == shape and memory.is_contiguous():
            file.read_into(_bytes_of(memory), offset)
            _check(piece, memory)
        else:
            buffer = self._next_buffer(count)
            file.read_into(_bytes_of(buffer), offset)
            with torch.cuda.stream(self._stream):
                self._convert(piece, buffer.view(entry.dtype).view(shape), memory)
                if self._stream is not None:
                    self._sent[self._turn].record(self._stream)
        if piece.job is not None:
            self._finish(piece.job)
        return count

    def finish(self) -> None:
        """Wait until everything has arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def _memory(self, piece: Piece) -> torch.Tensor:
        packing = None if piece.job is None else self._packing
        with torch.cuda.stream(packing):
            memory = piece.read.target.memory()[piece.lines.at]
        if self._stream is not None and packing is not None:
            self._stream.wait_stream(packing)  # what was staged there before has been packed
        return memory if memory.dim() else memory.reshape(1)

    def _convert(self, piece: Piece, stored: torch.Tensor, memory: torch.Tensor) -> None:
        """Whole lines cross the bus; what of them is not wanted is left out on the device."""
        rest = piece.read.target.part[len(piece.lines.inside) + 1 :]
        if stored.shape == memory.shape:
            memory.copy_(stored, non_blocking=self._on_gpu)
        else:
            memory.copy_(stored.to(memory.device, non_blocking=self._on_gpu)[(slice(None), *rest)])
        _check(piece, memory)

    def _finish(self, job: Job) -> None:
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
        if not job.count_down(event):
            return
        if self._packing is not None:
            for arrived in job.arrived:
                self._packing.wait_event(arrived)
        with torch.cuda.stream(self._packing):
            job.staging.finish()

    def _next_buffer(self, count: int) -> torch.Tensor:
        if not self._buffers:
            self._buffers = [
                torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._on_gpu) for _ in range(2)
            ]
            self._sent = [torch.cuda.Event() for _ in range(2)] if self._on_gpu else []
        self._turn ^= 1
        if self._on_gpu:
            self._sent[self._turn].synchronize()
        return self._buffers[self._turn][:count]


def _check(piece: Piece, memory: torch.Tensor) -> None:
    """A sum is NaN or infinite if anything in it is. What is staged cannot be looked at again: zeros, or NaN."""
    if memory.is_floating_point():
        seen = memory.float() if memory.itemsize == 1 else memory
        piece.total.copy_((seen if piece.job is None else seen * 0).sum())


def transfer(reads: list[Read], device: torch.device) -> Iterator[int]:
    """Fill each target from its file; yields the bytes of each piece that is read.

    All is there when the iterator ends. Raises MalformedFileError or OSError of the first piece that fails, and
    NotFiniteError for a tensor that holds NaN or infinities.
    """
    jobs: dict[Staging, Job] = {}
    parts = [(read, lines, _job(read.target, jobs)) for read in reads for lines in _parts(read)]
    # Sums are looked at once all is read, so that nothing waits.
    totals = torch.zeros(len(parts), dtype=torch.float32, device=device)
    pieces = [Piece(*part, total) for part, total in zip(parts, totals.unbind(), strict=True)]
    lanes: list[Lane] = []
    packing = torch.cuda.Stream(device) if pins(device) else None
    own = threading.local()

    def start() -> None:
        if pins(device):
            torch.cuda.set_device(device)
        own.lane = Lane(device, packing)
        lanes.append(own.lane)

    def fill(piece: Piece) -> int:
        count: int = own.lane.fill(piece)
        return count

    threads = max(1, min(MAX_THREADS if pins(device) or device.type == "cpu" else 1, os.cpu_count() or 1, len(pieces)))
    with ThreadPoolExecutor(threads, "weights", start) as pool:
        futures: list[Future[int]] = [pool.submit(fill, piece) for piece in pieces]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            for lane in lanes:
                lane.finish()
            if packing is not None:
                packing.synchronize()
    for index in (~totals.isfinite()).nonzero().flatten().tolist():
        piece = pieces[index]
        # A sum of finite numbers may be too large.
        if piece.job is not None or not piece.read.target.memory()[piece.lines.at].isfinite().all():
            raise NotFiniteError(piece.read.target.source)


def _job(target: Target, jobs: dict[Staging, Job]) -> Job | None:
    """Of the matrix that the target is part of, with one piece more."""
    if isinstance(target.into, torch.Tensor):
        return None
    job = jobs.setdefault(target.into.staging, Job(target.into.staging))
    job.left += 1
    return job


def _parts(read: Read) -> Iterator[_Lines]:
    """What is to be read: whole lines, about a chunk at a time."""
    if not read.entry.shape:
        yield _Lines((), 0, 1, ())
        return
    yield from _split(read, (), ())


def _split(read: Read, index: tuple[int, ...], at: tuple[int | slice, ...]) -> Iterator[_Lines]:
    """Inside of `index`; a line that is longer than a chunk is split further."""
    shape, depth = read.entry.shape, len(index)
    wanted = read.target.part[depth] if depth < len(read.target.part) else slice(None)
    begin, end, _ = wanted.indices(shape[depth])
    line = math.prod(shape[depth + 1 :]) * read.entry.dtype.itemsize
    if line > CHUNK_BYTES and depth + 1 < len(shape):
        for number in range(begin, end):
            yield from _split(read, (*index, number), (*at, number - begin))
        return
    step = max(CHUNK_BYTES // max(line, 1), 1)
    for first in range(begin, end, step):
        last = min(first + step, end)
        yield _Lines(index, first, last, (*at, slice(first - begin, last - begin)))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
