"""What the first half of a low-rank product hands to the second."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Shrunk(NamedTuple):
    """lines: float32 [splits, rows, parts * room], parts of a sum; those that nobody needs may be anything.

    done: if they are made on another stream, when they are there."""

    lines: torch.Tensor
    done: torch.cuda.Event | None = None
