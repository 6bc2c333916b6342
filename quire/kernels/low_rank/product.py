"""What adapters add to a product: y = gain · y + up @ (down @ x), each row with its own adapter's factors.

LoRA (Hu et al., 2021): a matrix W becomes W + scale · B A, with A [rank, k] and B [n, rank]; the scale is in `up`. DoRA
(Liu et al., 2024) divides each output by the norm of its line and multiplies it by a learned magnitude: that is the
gain, which is in `up` as well.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.elementwise.activation import silu_and_mul
from quire.kernels.low_rank.factors import Factors
from quire.kernels.low_rank.rows import AdapterRows


def shrink(x: torch.Tensor, rows: AdapterRows, factors: Factors) -> torch.Tensor:
    """The first half of what adapters add: x [rows, k] → [splits, rows, parts * room], what `down` makes of x, in parts
    of a sum.

    Lines that nobody needs may be anything: of rows without an adapter, and from an adapter's rank on. Factors must not
    be written by a kernel launched just before, nor `rows`: they are read ahead of its end.
    """
    if on_triton(x):
        from quire.kernels.low_rank.triton import product

        return product.shrink(x, rows, factors)
    inner = x.new_zeros((1, len(x), factors.down.shape[1]), dtype=factors.down.dtype)
    for slot, members in rows.members:
        inner[0, members] = x[members].to(inner.dtype) @ factors.down[slot - 1].T
    return inner


def expand(
    y: torch.Tensor,
    inner: torch.Tensor,
    rows: AdapterRows,
    factors: Factors,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The second half, with what follows a product: of y, which is changed in place, and `inner` as of `shrink`.

    gated: y is [gate | up], two parts, and the result silu(gate) * up, another tensor. residual [rows, n]: the result
    is added to it in place, and it is returned; y may be left as it is. Not both. See `shrink`.
    """
    if on_triton(y):
        from quire.kernels.low_rank.triton import product

        return product.expand(y, inner, rows, factors, bias, gated, residual)[0]
    y = _expand_reference(y, inner.sum(0), rows, factors, bias)
    if gated:
        return silu_and_mul(y)
    return y if residual is None else residual.add_(y)


def expand_gated_and_shrink(
    y: torch.Tensor,
    inner: torch.Tensor,
    rows: AdapterRows,
    factors: Factors,
    bias: torch.Tensor | None,
    reader: Factors,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`expand` with the gate, and `shrink` of its result [rows, k] by the factors of the one product that it goes to,
    of one part; None: that is left to itself."""
    alike = reader.down.dtype == factors.up.dtype and reader.down.shape[1:] == (factors.room, y.shape[1] // 2)
    if not on_triton(y) or not alike:
        return expand(y, inner, rows, factors, bias, gated=True), None
    from quire.kernels.low_rank.triton import product

    return product.expand(y, inner, rows, factors, bias, True, None, reader)


def _expand_reference(
    y: torch.Tensor, inner: torch.Tensor, rows: AdapterRows, factors: Factors, bias: torch.Tensor | None
) -> torch.Tensor:
    room, ranks = factors.room, factors.ranks.tolist()
    for slot, members in rows.members:
        rank, has_gains = ranks[slot - 1]
        if not rank:
            continue
        up, begin, own = factors.up[slot - 1, :rank], 0, y[members].float()
        if has_gains:
            gain = factors.gains[slot - 1]
            own = own * gain if bias is None else own * gain + (1 - gain) * bias
        for part, end in enumerate(factors.ends):
            lines = inner[members, part * room : part * room + rank].to(up.dtype)
            own[:, begin:end] += (lines @ up[:, begin:end]).float()
            begin = end
        y[members] = own.to(y.dtype)
    return y
