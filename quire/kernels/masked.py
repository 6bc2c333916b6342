"""Writes that leave some rows out, without asking the device which: plain torch would wait for it to count them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def only(
    there: torch.Tensor,
    index: torch.Tensor,
    values: torch.Tensor,
    read: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index and values of a write to the places that are `there`: all other rows write what one of these does.

    Args:
        there: which rows count.
        index: where they go; of the others anything.
        values: what they write.
        read: what is at a place now; if no row counts, that is written again.

    Shapes:
        there: bool [n]. index: int64 [n]. values: [n, ...]. read: int64 [1] → [1, ...]. Returns as given.
    """
    if not len(there):
        return index, values
    one = there.int().argmax(0, keepdim=True)
    place = index.index_select(0, one).clamp(min=0)
    value = values.index_select(0, one)
    keep = (-1, *(1,) * (values.dim() - 1))
    value = torch.where(there.index_select(0, one).view(keep), value, read(place))
    return torch.where(there, index, place), torch.where(there.view(keep), values, value)
