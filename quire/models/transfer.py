"""Bytes of files into tensors, several threads at once: straight there on a CPU, through pinned memory to a GPU.

One thread copies out of the page cache at a fraction of what memory and bus give; reads leave the interpreter's lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import NamedTuple

import torch

from quire.models.safetensors_file import Entry, SafetensorsFile

CHUNK_BYTES = 16 * 1024**2
MAX_THREADS = 8


class Piece(NamedTuple):
    """Elements [begin, begin + len(target)) of a stored tensor and the memory they belong in."""

    file: SafetensorsFile
    entry: Entry
    begin: int
    target: torch.Tensor  # one-dimensional, contiguous, of any floating type
    total: torch.Tensor  # float32 scalar on the target's device: gets the sum of what has been read


class NotFiniteError(Exception):
    """`entry` holds NaN or infinities, or becomes such in the model's dtype."""

    def __init__(self, entry: Entry) -> None:
        super().__init__("not finite")
        self.entry = entry


class Lane:
    """What one thread reads through: two staging buffers, one filled while the other is on its way to the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._buffers: list[torch.Tensor] = []
        self._sent: list[torch.cuda.Event] = []
        self._turn = 0

    def fill(self, piece: Piece) -> int:
        """Returns the bytes read. Raises MalformedFileError, OSError."""
        file, entry, begin, target, total = piece
        size = entry.dtype.itemsize
        offset, count = entry.start + begin * size, target.numel() * size
        if not self._on_gpu and target.dtype == entry.dtype:
            file.read_into(_bytes_of(target), offset)
            total.copy_(target.sum())
            return count
        buffer = self._next_buffer()[:count]
        file.read_into(_bytes_of(buffer), offset)
        with torch.cuda.stream(self._stream):
            target.copy_(buffer.view(entry.dtype), non_blocking=self._on_gpu)
            total.copy_(target.sum())
            if self._stream is not None:
                self._sent[self._turn].record(self._stream)
        return count

    def finish(self) -> None:
        """Wait until everything has arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def _next_buffer(self) -> torch.Tensor:
        if not self._buffers:
            self._buffers = [
                torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._on_gpu) for _ in range(2)
            ]
            self._sent = [torch.cuda.Event() for _ in range(2)] if self._on_gpu else []
        self._turn ^= 1
        if self._on_gpu:
            self._sent[self._turn].synchronize()
        return self._buffers[self._turn]


def transfer(tensors: list[tuple[SafetensorsFile, Entry, torch.Tensor]], device: torch.device) -> Iterator[int]:
    """Fill each tensor (contiguous, of its entry's shape) from its file; yields the bytes of each piece that is read.

    All is there when the iterator ends. Raises MalformedFileError or OSError of the first piece that fails, and
    NotFiniteError for a tensor that holds NaN or infinities.
    """
    parts = [(file, entry, *part) for file, entry, target in tensors for part in _parts(entry, target.view(-1))]
    # A sum is NaN or infinite if anything in it is; sums are looked at once all is read, so that nothing waits.
    totals = torch.empty(len(parts), dtype=torch.float32, device=device)
    pieces = [Piece(*part, total) for part, total in zip(parts, totals.unbind(), strict=True)]
    lanes: list[Lane] = []
    own = threading.local()

    def start() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        own.lane = Lane(device)
        lanes.append(own.lane)

    def fill(piece: Piece) -> int:
        count: int = own.lane.fill(piece)
        return count

    threads = max(1, min(MAX_THREADS, os.cpu_count() or 1, len(pieces)))
    with ThreadPoolExecutor(threads, "weights", start) as pool:
        futures: list[Future[int]] = [pool.submit(fill, piece) for piece in pieces]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            for lane in lanes:
                lane.finish()
    for index in (~totals.isfinite()).nonzero().flatten().tolist():
        if not pieces[index].target.isfinite().all():  # a sum of finite numbers may be too large
            raise NotFiniteError(pieces[index].entry)


def _parts(entry: Entry, target: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    step = max(CHUNK_BYTES // entry.dtype.itemsize, 1)
    for begin in range(0, target.numel(), step):
        yield begin, target[begin : begin + step]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
