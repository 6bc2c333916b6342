"""The streams of an engine, handed on to the next one of the process.

The library keeps a workspace of tens of megabytes for every stream that it has ever multiplied on, for as long as the
process lives, and graphs hold its address: while there may be any, nobody can free it. So streams are few, and are used
again (`workspaces.py`: what is freed all the same).
"""

from __future__ import annotations

from collections import defaultdict

import torch

_idle: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def idle_streams() -> list[torch.cuda.Stream]:
    """Of engines that are gone, on all devices."""
    return [stream for streams in _idle.values() for stream in streams]


class Streams:
    """Of one engine on `device`; None where its platform has none."""

    def __init__(self, device: torch.device, *, runs_ahead: bool) -> None:
        self._device, self._has_any = device, runs_ahead
        self.readback = self._take()
        self.compute = self._take()

    def _take(self) -> torch.cuda.Stream | None:
        if not self._has_any:
            return None
        idle = _idle[self._device]
        return idle.pop() if idle else torch.cuda.Stream(self._device)

    def give_back(self) -> None:
        """Nothing may run on them any more. The last to be given back is the first to be taken: each keeps its use."""
        for stream in (self.compute, self.readback):
            if stream is not None:
                _idle[self._device].append(stream)
        self.compute = self.readback = None
