"""The masks of a step on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.sampling.bitmask import apply_bitmask


@dataclass(frozen=True, slots=True)
class Masks:
    """Of rows of the step's logits, rising."""

    rows_np: np.ndarray  # int32 [masks]
    rows: torch.Tensor  # the same on the device
    bits: torch.Tensor  # int32 [masks, words]

    def apply(self, logits: torch.Tensor, first: int = 0) -> None:
        """In place. logits: rows `first`, first + 1, … of the step's."""
        part = slice(*np.searchsorted(self.rows_np, [first, first + len(logits)]).tolist())
        rows = self.rows[part]
        apply_bitmask(logits, rows - first if first else rows, self.bits[part])
