"""Bytes of a file into tensors: straight there on a CPU, through pinned memory to a GPU."""

from __future__ import annotations

import torch

from quire.models.safetensors_file import Entry, SafetensorsFile

CHUNK_BYTES = 32 * 1024**2


class Transfer:
    """Fills tensors on one device. On a GPU, one staging buffer is read from disk while the other is on its way."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffers = [
            torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._on_gpu) for _ in range(2)
        ]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def fill(self, target: torch.Tensor, file: SafetensorsFile, entry: Entry) -> None:
        """target: contiguous, of the entry's shape, any floating type. Raises MalformedFileError, OSError."""
        flat = target.view(-1)
        if not self._on_gpu and target.dtype == entry.dtype:
            file.read_into(_bytes_of(flat), entry.start)
            return
        size = entry.dtype.itemsize
        step = CHUNK_BYTES // size
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            buffer = self._next_buffer()[: part.numel() * size]
            file.read_into(_bytes_of(buffer), entry.start + begin * size)
            part.copy_(buffer.view(entry.dtype), non_blocking=self._on_gpu)
            self._mark_sent()

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for event in self._sent:
            if event is not None:
                event.synchronize()

    def _next_buffer(self) -> torch.Tensor:
        self._turn ^= 1
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        return self._buffers[self._turn]

    def _mark_sent(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
            self._sent[self._turn] = event


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
