"""One host-to-device copy a step: everything the plan says is packed into one pinned buffer and sent at once.

Pinned buffers rotate, so that the host may fill the next one while a copy is still on its way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.platforms.transfers import pins

ALIGNED = 4  # elements, 16 bytes: kernels are compiled once for aligned arrays, not once more for others


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the buffer being filled, in int32 elements."""

    start: int
    stop: int


class Staging:
    """A ring of pinned int32 buffers and their one twin on the device.

    Use: `put` what the step needs, `send`, then read `view(span)` on the compute stream.
    Views stay valid until the next `send`; one stream orders readers before the next copy.
    """

    def __init__(self, capacity: int, device: torch.device, slots: int = 4) -> None:
        self.capacity = capacity
        self._pinned = pins(device)
        self._host = [torch.empty(capacity, dtype=torch.int32, pin_memory=self._pinned) for _ in range(slots)]
        self._host_np = [buffer.numpy() for buffer in self._host]
        self._sent = [torch.cuda.Event() for _ in range(slots)] if self._pinned else []
        self._device = torch.empty(capacity, dtype=torch.int32, device=device) if device.type != "cpu" else None
        self._slot = 0
        self._fill = 0

    @property
    def room(self) -> int:
        """Elements that still fit before the next `send`."""
        return self.capacity - self._fill - ALIGNED

    def put(self, values: np.ndarray | list[int]) -> Span:
        start = -(-self._fill // ALIGNED) * ALIGNED
        stop = start + len(values)
        if stop > self.capacity:
            raise ValueError(f"staging holds {self.capacity} values, {stop} were put")
        self._host_np[self._slot][start:stop] = values
        self._fill = stop
        return Span(start, stop)

    def send(self) -> None:
        """Start the copy and turn to the next pinned buffer (waiting only if its last copy is still running)."""
        if self._device is None:
            self._latest = self._host[self._slot]
        elif self._fill:
            self._device[: self._fill].copy_(self._host[self._slot][: self._fill], non_blocking=self._pinned)
            if self._pinned:
                self._sent[self._slot].record()
        self._slot = (self._slot + 1) % len(self._host)
        if self._pinned:
            self._sent[self._slot].synchronize()
        self._fill = 0

    def view(self, span: Span) -> torch.Tensor:
        source = self._latest if self._device is None else self._device
        return source[span.start : span.stop]
