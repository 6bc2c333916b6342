"""Work that runs beside what is launched next, in a graph: on a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def is_possible(device: torch.device) -> bool:
    """Whether a graph is being captured. Elsewhere two events take the CPU longer than the device gains.

    To be asked in a first run without a graph too, so that the stream is there before the capture."""
    _stream(device)
    return torch.cuda.is_current_stream_capturing()


@contextmanager
def beside(device: torch.device) -> Iterator[torch.cuda.Event]:
    """What is launched inside comes after all that the current stream has by now, and before what waits for the event.

    It must be waited for before anything that is used inside is freed, and before the next such work. Launches inside
    are no dependent ones (`kernels/triton/launch.py`).
    """
    current, side, done = torch.cuda.current_stream(device), _stream(device), torch.cuda.Event()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield done
        done.record(side)
