"""Rows that are not added up yet: what sums over ranks take as it is, and add up on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Summands:
    """Rows, of which each is the sum of some.

    parts [m, k, n], contiguous: k of each row. experts int32 [m, k], on a GPU: -1 where there is no part; None: all are
    there.
    """

    parts: torch.Tensor
    experts: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.parts)

    def sum(self) -> torch.Tensor:
        """[m, n], added up in float32 and rounded once."""
        if self.experts is None:
            return self.parts.sum(1, dtype=torch.float32).to(self.parts.dtype)
        from quire.kernels.moe.triton.grouped import combine

        return combine(self.parts.flatten(0, 1), self.experts, None)
