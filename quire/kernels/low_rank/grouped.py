"""Low-rank products of rows with factors of their own each: those of a row's group, as with a mixture's experts."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GroupedFactors(NamedTuple):
    """Of groups, stacked: down [groups, parts · rank, k], up [groups, n, rank], of which each part has n / parts rows;
    gains float32 [groups, n] that the product without factors is multiplied by, or None."""

    down: torch.Tensor
    up: torch.Tensor
    gains: torch.Tensor | None
    parts: int


def add_grouped(y: torch.Tensor, x: torch.Tensor, groups: torch.Tensor, factors: GroupedFactors) -> torch.Tensor:
    """`y[i] = gains[g] · y[i] + up[g] · (down[g] · x[i])` for g = groups[i], part by part, in place; returns y.

    Two batched products for all rows; where some groups have many more rows than others, two for each share of these.
    Waits for the device to know how many.

    Shapes:
        y [rows, n]; x [rows, k]; groups int64 [rows], -1: the row stays as it is.
    """
    rows = (groups >= 0).nonzero()[:, 0]
    if not len(rows):
        return y
    rows = rows[groups[rows].argsort(stable=True)]
    hit, group, counts = groups[rows].unique_consecutive(return_inverse=True, return_counts=True)
    place = torch.arange(len(rows), device=x.device) - (counts.cumsum(0) - counts)[group]
    most, room = int(counts.max()), 2 * -(-len(rows) // len(hit))
    for first in range(0, most, room):
        now = slice(None) if most <= room else ((place >= first) & (place < first + room)).nonzero()[:, 0]
        own, at, lines = group[now], place[now] - first, rows[now]
        padded = x.new_zeros((len(hit), min(room, most), x.shape[1]), dtype=factors.down.dtype)
        padded[own, at] = x[lines].to(padded.dtype)
        added = _product(padded, factors, hit)[own, at].to(y.dtype)
        there = y[lines]
        if factors.gains is not None:
            there = there * factors.gains[hit[own]].to(y.dtype)
        y[lines] = there + added
    return y


def _product(padded: torch.Tensor, factors: GroupedFactors, hit: torch.Tensor) -> torch.Tensor:
    """[groups, room, k] → [groups, room, n], of the groups that are hit."""
    down, up, parts = factors.down[hit], factors.up[hit], factors.parts
    count, room, _ = padded.shape
    rank, width = up.shape[2], up.shape[1] // parts
    inner = torch.bmm(padded, down.transpose(1, 2)).view(count, room, parts, rank).transpose(1, 2)
    outer = torch.matmul(inner, up.view(count, parts, width, rank).transpose(2, 3))
    return outer.transpose(1, 2).reshape(count, room, parts * width)
