"""Context parallelism: copies of a model that compute a part of a step's prompt tokens each.

The step's prompt tokens are one line, cut into twice as many pieces as there are copies; copy r has piece r, and piece
r counted from the end. So all have as many tokens and, since a query sees what is before it, as much to attend to.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from quire.config.parallel.contexts import least_tokens


class Contexts:
    """Of `size` copies this process is part of number `number`."""

    def __init__(self, number: int, size: int, device: torch.device, ranks: dist.ProcessGroup | None) -> None:
        """ranks: those with the same part of each layer, one a copy; None: nobody to meet."""
        self.number, self.size = number, size
        self.least_tokens = least_tokens(size, on_cpu=device.type == "cpu")
        self._ranks = ranks

    def pieces(self, tokens: int) -> tuple[range, range]:
        """Of a line of so many tokens those that are computed here."""
        length = self.piece_length(tokens)
        first, last = (range(piece * length, (piece + 1) * length) for piece in self._own)
        every = range(tokens)
        return every[first.start : first.stop], every[last.start : last.stop]

    def piece_length(self, tokens: int) -> int:
        """Of all pieces but the last ones, which may be shorter."""
        return -(-tokens // (2 * self.size))

    @property
    def _own(self) -> tuple[int, int]:
        return self.number, 2 * self.size - 1 - self.number

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """part: of the same shape on all copies, contiguous, of any type. Returns [copies, *its shape]."""
        every = torch.empty((self.size, *part.shape), dtype=part.dtype, device=part.device)
        # As bytes: not every library knows every type.
        sent, received = (x.view(-1).view(torch.uint8) for x in (part, every))
        if part.device.type == "cuda":
            dist.all_gather_into_tensor(received, sent, group=self._ranks)
        else:
            dist.all_gather(list(received.view(self.size, -1).unbind()), sent, group=self._ranks)
        return every
