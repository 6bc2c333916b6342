"""Products by the library as two summands, each of one half of K, for sums over ranks that add them up on the way.

A rank's product of some hundred rows has few outputs and many inputs: the library's tiles of it are fewer than
processors. Two halves side by side are twice as many, and take half as long.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_cuda
from quire.kernels.summands import Summands

MOST_ROWS = 256  # above those of `decode_gemm`
_TILE = 128  # rows, and outputs
_EVEN = 64  # inputs of a half


def pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Of x [m, k] and weight [n, k]: both halves' tiles find a processor, and what is saved, which grows with k, is
    more than what another summand of n numbers takes. On an H200, halves one behind the other, of 256 rows, 4,096 ×
    3,584 took 16.1 µs whole and 14.1 in halves (160 rows: 17.5 and 12.0), 2,048 × 2,048 6.9 and 6.5, but 4,096 × 1,024
    6.6 and 6.8."""
    (m, k), n = x.shape, len(weight)
    if not on_cuda(x) or m > MOST_ROWS or 2 * k < n or k % (2 * _EVEN) or x.dtype != weight.dtype or x.itemsize != 2:
        return False
    from quire.kernels.gemm.triton.plan import MAX_ROWS
    from quire.kernels.triton.launch import num_processors

    return m > MAX_ROWS and 2 * -(-m // _TILE) * -(-n // _TILE) <= num_processors(x.device)


def linear(x: torch.Tensor, weight: torch.Tensor) -> Summands:
    """x [m, k] @ weight [n, k].T in two parts a row: that of the first half of k, and that of the second."""
    parts = torch.empty((len(x), 2, len(weight)), dtype=x.dtype, device=x.device)
    of_x, of_weight = (matrix.unflatten(1, (2, -1)) for matrix in (x, weight))
    torch.bmm(of_x.transpose(0, 1), of_weight.permute(1, 2, 0), out=parts.transpose(0, 1))
    return Summands(parts)
