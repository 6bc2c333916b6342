"""What adapters add to a product: y = gain · y + up @ (down @ x), each row with its own adapter's factors.

LoRA (Hu et al., 2021): a matrix W becomes W + scale · B A, with A [rank, k] and B [n, rank]; the scale is in `up`. DoRA
(Liu et al., 2024) divides each output by the norm of its line and multiplies it by a learned magnitude: that is the
gain, which is in `up` as well.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.low_rank.factors import Factors
from quire.kernels.low_rank.rows import AdapterRows


def add_low_rank(
    y: torch.Tensor, x: torch.Tensor, rows: AdapterRows, factors: Factors, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Add what the adapters of x's rows make of them to y = x @ weight.T + bias, in place; returns it.

    Shapes:
        x [rows, k]; y [rows, n], contiguous; bias [n].
    """
    if on_triton(x):
        from quire.kernels.low_rank.triton import product

        return product.expand(y, product.shrink(x, rows, factors), rows, factors, bias)
    inner = x.new_zeros((len(x), factors.down.shape[1]), dtype=factors.down.dtype)
    for slot, members in rows.members:
        inner[members] = x[members].to(inner.dtype) @ factors.down[slot - 1].T
    return expand_reference(y, inner, rows, factors, bias)


def expand(
    y: torch.Tensor, inner: torch.Tensor, rows: AdapterRows, factors: Factors, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The second half of the same. inner [rows, parts * room]: what `down` made of x."""
    if on_triton(y):
        from quire.kernels.low_rank.triton import product

        return product.expand(y, inner[None].float(), rows, factors, bias)
    return expand_reference(y, inner, rows, factors, bias)


def expand_reference(
    y: torch.Tensor, inner: torch.Tensor, rows: AdapterRows, factors: Factors, bias: torch.Tensor | None = None
) -> torch.Tensor:
    room, ranks = factors.room, factors.ranks.tolist()
    for slot, members in rows.members:
        if not ranks[slot - 1]:
            continue
        gain, up, begin = factors.gains[slot - 1], factors.up[slot - 1], 0
        own = y[members].float() * gain
        if bias is not None:
            own += (1 - gain) * bias
        for part, end in enumerate(factors.ends):
            lines = inner[members, part * room : (part + 1) * room]
            own[:, begin:end] += (lines @ up[begin:end].T).float()
            begin = end
        y[members] = own.to(y.dtype)
    return y
