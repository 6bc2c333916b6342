"""Greedy and temperature sampling of rows whose logits lie in parts, on the ranks that made them.

Each rank tells the others two numbers of a row: its greatest logit, and the mass of its tokens, or in a greedy row the
token. All know then whose part the row's uniform falls in; that rank draws from its part, and tells what. Parts follow
each other by token id, so this is the inverse CDF of `sampling`, with the same uniform, and the same token but for how
sums round.
"""

from __future__ import annotations

import torch

from quire.distributed.peer_memory import PeerMemory
from quire.kernels.sampling.draws import LARGEST, clean, floats, pick, uniform
from quire.kernels.sampling.state import Column, Stats


def draw_apart(
    part: torch.Tensor,
    columns: torch.Tensor,
    seats: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    stats: Stats,
    peers: PeerMemory,
) -> None:
    """Write one token a row to `out`, the same on every rank; all call it together, with the same numbers but `part`.

    part: float32 [rows, columns], this rank's of the logits, as wide as any rank's; the others: see `sampling.sample`.
    At most as many rows as `peers` has logits, and `stats` is for as many columns. Fit for a CUDA graph.
    """
    from quire.kernels.sampling.triton import apart

    apart.draw_apart(part, columns, seats, lengths, out, stats, peers)


def draw_apart_reference(
    parts: list[torch.Tensor], columns: torch.Tensor, seats: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """int64 [rows]: the same from all ranks' parts, whose columns together are the vocabulary; in float64."""
    rows = columns[seats.long()]
    sharpness = floats(rows, Column.INV_TEMPERATURE).double().unsqueeze(1)
    cleaned = [clean(part) for part in parts if part.shape[1]]
    tops = torch.stack([part.amax(-1) for part in cleaned], 1)
    best = tops.amax(-1, keepdim=True).clamp(min=-LARGEST).double()
    weights = [((part - best) * sharpness).exp() for part in cleaned]
    shares = torch.stack([weight.sum(-1) for weight in weights], 1)
    u = uniform(rows[:, Column.KEY_LOW], rows[:, Column.KEY_HIGH], lengths).double()
    owner, rest = pick(shares, u * shares.sum(-1))
    owner = torch.where(sharpness[:, 0] > 0, owner, tops.argmax(-1))
    found, first = torch.zeros_like(owner), 0
    for number, (part, weight) in enumerate(zip(cleaned, weights, strict=True)):
        token = torch.where(sharpness[:, 0] > 0, pick(weight, rest)[0], part.argmax(-1))
        found = torch.where(owner == number, first + token, found)
        first += part.shape[1]
    return found.masked_fill(seats == 0, 0)
