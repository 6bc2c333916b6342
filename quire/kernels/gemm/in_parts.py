"""Products as some summands, each of a part of K, for who adds them up on the way: sums over ranks, and the rotation of
queries and keys.

A rank's product of some rows has few outputs and many inputs: tiles of it are fewer than processors. Parts side by side
find more, and take less long. Up to 128 rows they are of our own kernel, from there on of the library's.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_cuda
from quire.kernels.gemm.decode_gemm import has_ahead
from quire.kernels.gemm.triton import plan
from quire.kernels.gemm.triton.plan import MAX_ROWS, Ahead
from quire.kernels.summands import Summands

MOST_ROWS = 256
_TILE = 128  # rows, and outputs, of the library's
_EVEN = 64  # inputs of a part


def parts_to_sum(x: torch.Tensor, weight: torch.Tensor) -> int:
    """In how many parts x [m, k] @ weight [n, k].T goes into a sum over ranks; 1: whole.

    What is saved, which grows with k, is to be more than what another summand of n numbers takes. On an H200, 256 rows
    of 4,096 × 3,584 took 14.7 µs whole and 13.5 in halves (160 rows: 17.0 and 11.2), of 4,096 × 2,048 10.1 and 9.4, but
    of 4,096 × 1,024 6.3 and 6.6 (`python benchmarks/kernels.py --only in-parts`).
    """
    (m, k), n = x.shape, len(weight)
    if m <= MAX_ROWS:
        return plan.parts_to_sum(m, n, k) if has_ahead(x, weight) else 1
    return 2 if 2 * k >= n and _fit(x, weight, 2) else 1


def parts_to_rotate(x: torch.Tensor, weight: torch.Tensor) -> int:
    """In how many parts a product of queries, keys and values goes to their rotation; 1: whole.

    On an H200, 256 rows of 1,536 × 4,096 took 10.0 µs whole, 8.4 in two parts and 7.7 in four (160 rows: 11.2, 7.4 and
    7.3), of 3,072 × 4,096 14.0, 11.8 and 12.6, but of 2,048 × 1,024 5.1, 4.8 and 5.3, which leaves nothing for reading
    twice as much.
    """
    (m, k), n = x.shape, len(weight)
    if m <= MAX_ROWS:
        return plan.parts_to_rotate(m, n, k) if has_ahead(x, weight) else 1
    return next((parts for parts in (4, 2) if k >= 1024 * parts and _fit(x, weight, parts)), 1)


def _fit(x: torch.Tensor, weight: torch.Tensor, parts: int) -> bool:
    """Whether the library takes parts, and all their tiles find a processor."""
    (m, k), n = x.shape, len(weight)
    if not on_cuda(x) or m > MOST_ROWS or k % (parts * _EVEN) or x.dtype != weight.dtype or x.itemsize != 2:
        return False
    from quire.kernels.triton.launch import num_processors

    return parts * -(-m // _TILE) * -(-n // _TILE) <= num_processors(x.device)


def linear(x: torch.Tensor, weight: torch.Tensor, parts: int) -> Summands:
    """x [m, k] @ weight [n, k].T in so many parts a row, of the columns of k one after the other."""
    out = torch.empty((len(x), parts, len(weight)), dtype=x.dtype, device=x.device)
    if len(x) <= MAX_ROWS and has_ahead(x, weight):
        from quire.kernels.gemm.triton import ahead_sm90

        ahead_sm90.linear(x, weight, out.flatten(1), Ahead(64, parts), gated=False)
        return Summands(out)
    of_x, of_weight = (matrix.unflatten(1, (parts, -1)) for matrix in (x, weight))
    torch.bmm(of_x.transpose(0, 1), of_weight.permute(1, 2, 0), out=out.transpose(0, 1))
    return Summands(out)
