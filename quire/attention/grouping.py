"""Rows of like length are attended together: padded to the longest, they are one call of a library's kernel."""

from __future__ import annotations

from collections.abc import Sequence


def alike(lengths: Sequence[int], *, padding: float, extra: int, most: int, unit: int = 1) -> list[list[int]]:
    """Row numbers in groups of similar length, rising in each.

    Args:
        lengths: of the rows, in tokens.
        padding, extra: the longest of a group has at most `padding` times the shortest's tokens and `extra` more.
        most: tokens of a group, padding included, unless one row alone has more.
        unit: what lengths are rounded up to.
    """
    groups: list[list[int]] = []
    limit = 0.0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = -(-lengths[row] // unit) * unit
        if groups and length <= limit and (len(groups[-1]) + 1) * length <= most:
            groups[-1].append(row)
        else:
            groups.append([row])
            limit = length * padding + extra
    return [sorted(group) for group in groups]
