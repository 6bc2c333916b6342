"""Files of torch's own form (.bin, .pt), read as those of safetensors are: by name, type, shape and place.

Another process says where each tensor lies (`quire/conversion/torch_file.py`); what it says is checked here.
"""

from __future__ import annotations

import math
import select
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec
import torch

from quire.conversion.job import Listing
from quire.foundation.fork_server import ForkClient
from quire.models.safetensors_file import Entry, MalformedFileError, TensorFile

_SECONDS = 260.0  # longer than a fork lives


class TorchFiles:
    """The other process, for all files of a checkpoint."""

    def __init__(self) -> None:
        self._client: ForkClient | None = None

    def __enter__(self) -> TorchFiles:
        self._client = ForkClient("quire.conversion.torch_file")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._client is not None:
            self._client.close()

    def open(self, path: Path) -> TensorFile:
        """Raises MalformedFileError, also for a file that holds anything besides tensors, or OSError."""
        return _TorchFile(path, self._ask)

    def _ask(self, path: Path) -> Listing:
        assert self._client is not None
        answer = b""
        try:
            self._client.send(1, str(path.absolute()).encode())
            while not answer and select.select([self._client.socket], [], [], _SECONDS)[0]:
                answers = self._client.receive()
                if answers and not (answer := answers[0][1]):
                    break
        except (EOFError, OSError):
            pass
        if not answer:
            raise MalformedFileError("cannot be read: it takes more time or memory than it may")
        return msgspec.msgpack.decode(answer, type=Listing)


class _TorchFile(TensorFile):
    def __init__(self, path: Path, ask: Callable[[Path], Listing]) -> None:
        self._ask = ask
        super().__init__(path)

    def _parse(self, path: Path, size: int) -> dict[str, Entry]:
        listing = self._ask(path)
        if listing.error:
            raise MalformedFileError(listing.error)
        entries = {}
        for name, place in listing.tensors.items():
            dtype = getattr(torch, place.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise MalformedFileError(f"gives {name!r} the unknown dtype {place.dtype!r}")
            needed = math.prod(place.shape) * dtype.itemsize
            if place.start < 0 or any(length < 0 for length in place.shape) or place.start + needed > size:
                raise MalformedFileError(f"ends before its tensor {name!r} (is it cut off?)")
            entries[name] = Entry(dtype, tuple(place.shape), place.start, needed)
        return entries
