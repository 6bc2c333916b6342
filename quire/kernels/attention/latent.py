"""Around latent attention (MLA; DeepSeek-V2, 2024): from projections to queries of latent rows and to the cache, and
from weighted latent rows back to heads' values.

A token's row in the cache is [latent | rotary key], [rank + rope]. With queries that went through the keys' matrix the
row is key and value of all heads at once: scores are products with the row, results are weighted sums of its first
`rank` numbers, which then go through the values' matrix. So no key or value of a head is ever made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.kernels.attention.rope import rotate, write_slots
from quire.kernels.dispatch import on_triton
from quire.kernels.elementwise.norm import rms_norm_reference

FEW = 64  # tokens, at most, whose heads go through their matrices in a kernel here
LONGEST = 1024  # columns of such a product's sums: a program has all of them at once


class LatentTarget(NamedTuple):
    """What becomes of rotary columns and latent rows: arguments of `rope_write`, in its order."""

    cos_sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cache: torch.Tensor
    interleaved: bool

    def of(self, tokens: slice) -> LatentTarget:
        """Of some of the tokens."""
        return self._replace(positions=self.positions[tokens], slots=self.slots[tokens])


def latent_queries(
    q: torch.Tensor,
    latent: torch.Tensor,
    keys: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    target: LatentTarget,
) -> torch.Tensor:
    """Queries of latent rows; the tokens' own rows go to their slots in the cache.

    Args:
        q: of each head the columns without positions, then those that turn.
        latent: latent row before its norm, then the rotary key.
        keys: the matrix that makes a head's key of a latent row.
        norm: of latent rows, RMS: weight and eps.
        target: where positions and slots are int32, a slot of -1 is nowhere, and cos_sin is as in `rope.py`.

    Shapes:
        q [tokens, heads, nope + rope], columns contiguous; latent [tokens, rank + rope], rows apart as may be; keys
        [heads, nope, rank]; norm's weight [rank]; cos_sin [positions, rope]; cache [blocks, 1, block_size, rank +
        rope]. Returns [tokens, heads, rank + rope].
    """
    nope, rank = keys.shape[1:]
    tokens, heads, width = q.shape
    queries = torch.empty((tokens, heads, rank + width - nope), dtype=q.dtype, device=q.device)
    if _are_few(q, keys):
        from quire.kernels.attention.triton import by_head as kernels

        kernels.latent_queries(q, latent, keys, queries, norm, *target)
        return queries
    by_head(q[..., :nope], keys, queries[..., :rank])
    rope_write(q[..., nope:], latent, queries[..., rank:], norm, *target)
    return queries


def by_head(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, heads, k] times each head's own weight [heads, k, n] → [tokens, heads, n], written to `out` if given.

    Any strides will do with contiguous columns, of `out` too. `weight` must not be written by the kernel launched just
    before: it is read ahead of its end.
    """
    if out is None:
        out = torch.empty((*x.shape[:2], weight.shape[2]), dtype=x.dtype, device=x.device)
    if _are_few(x, weight):
        from quire.kernels.attention.triton import by_head as kernels

        kernels.by_head(x, weight, out)
    elif len(x):
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def _are_few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there is a kernel for x [tokens, heads, …] and weight [heads, k, n] that beats the library's product: of
    few rows that takes as long to begin as to multiply, and what follows waits for its end."""
    return on_triton(x) and 0 < len(x) <= FEW and x.itemsize == weight.itemsize == 2 and weight.shape[1] <= LONGEST


def rope_write(
    q: torch.Tensor,
    latent: torch.Tensor,
    out: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    interleaved: bool,
) -> None:
    """q [tokens, heads, rope] turned → out, likewise, which may be q; latent [tokens, rank + rope], normed and turned →
    the cache.

    positions and slots must not be written by the kernel launched just before: they are read ahead of its end.
    """
    if on_triton(latent):
        from quire.kernels.attention.triton import latent as kernels

        kernels.rope_write(q, latent, out, norm, cos_sin, positions, slots, cache, interleaved)
    else:
        rope_write_reference(q, latent, out, norm, cos_sin, positions, slots, cache, interleaved)


def rope_write_reference(
    q: torch.Tensor,
    latent: torch.Tensor,
    out: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    interleaved: bool,
) -> None:
    rank = len(norm[0])
    row, key = latent.float().split([rank, latent.shape[1] - rank], dim=1)
    key = rotate(key.unsqueeze(1), cos_sin, positions, interleaved=interleaved)
    write_slots(cache, slots, torch.cat([rms_norm_reference(row, *norm).unsqueeze(1), key], dim=2))
    out.copy_(rotate(q, cos_sin, positions, interleaved=interleaved))
