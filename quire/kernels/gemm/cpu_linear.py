"""x @ weight.T on a CPU, with the checkpoint's own weight layout and no second copy of the weights.

A few rows cost what reading the weights costs. oneDNN reads them at three fifths of the memory's speed when they are
the product's right-hand side, as `linear` has them, and at nearly full speed when they are on the left: the rows are
then the narrow side, and no tile of the weights has to be re-packed. Figures: benchmarks/cpu_model.py --linear.
"""

from __future__ import annotations

import torch

MAX_LEFT_ROWS = 48  # beyond, arithmetic outweighs reading and the usual side is the faster one
# oneDNN keeps code and scratch memory, up to a megabyte, for every shape it has seen: rows are padded to few numbers.
LEFT_STEP, RIGHT_STEP = 8, 32


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T + bias [n] → [m, n], contiguous, accumulated in float32."""
    rows = x.shape[0]
    if weight.dtype == torch.float32:  # MKL's: any side, any number of rows, nothing kept
        return torch.nn.functional.linear(x, weight, bias)
    if rows > MAX_LEFT_ROWS:
        return torch.nn.functional.linear(_padded(x, RIGHT_STEP), weight, bias)[:rows]
    if rows == 1:
        y = torch.mv(weight, x[0]).unsqueeze(0)
    else:
        y = torch.mm(weight, (_padded(x, LEFT_STEP) if rows > LEFT_STEP else x).t())[:, :rows].t().contiguous()
    return y if bias is None else y.add_(bias)


def _padded(x: torch.Tensor, step: int) -> torch.Tensor:
    """x [m, k] with zero rows below it, up to a multiple of `step`."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % step))
