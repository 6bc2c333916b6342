"""What experts make of their tokens, before it is added up."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Summands:
    """Rows, of which each is the sum of some: of those of k choices that somebody has made.

    parts [m · k, n], a choice after the other of a row; experts int32 [m, k]: -1 where there is no part. On a GPU.
    """

    parts: torch.Tensor
    experts: torch.Tensor

    def __len__(self) -> int:
        return len(self.experts)

    def sum(self) -> torch.Tensor:
        """[m, n], added up in float32 and rounded once."""
        from quire.kernels.moe.triton.grouped import combine

        return combine(self.parts, self.experts, None)
