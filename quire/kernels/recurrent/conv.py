"""Causal convolution of each channel by itself, over the last few inputs; those before a step are the row's state."""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.recurrent.rows import Rows


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: Rows,
    entry: int,
    *,
    silu: bool = True,
) -> torch.Tensor:
    """y[t] = sum over k of weight[:, k] · x[t - K + 1 + k] + bias, through SiLU, row by row; the state follows.

    Args:
        x: the step's inputs, of any stride between tokens.
        weight: of K taps a channel.
        state: the K - 1 inputs before, by page; updated in place.
        entry: which of a row's pages has it.

    Shapes:
        x: [tokens, channels]. weight: [channels, K]. bias: [channels]. state: [pages, K - 1, channels]. Returns a
        contiguous [tokens, channels].
    """
    if on_triton(x):
        from quire.kernels.recurrent.triton import conv

        return conv.causal_conv(x, weight, bias, state, rows, entry, silu=silu)
    taps, tokens = weight.shape[1], len(x)
    pages = rows.pages[:, entry].long()
    before = state[pages]
    old = before.masked_fill(~rows.goes_on[:, None, None], 0)
    starts = rows.query_start.long()
    row = rows.row_of_token
    token = torch.arange(tokens, device=x.device)
    offset = token - starts[row]
    y = x.float() * weight[:, -1].float()
    for back in range(1, taps):
        inside = x[(token - back).clamp_(min=0)]
        outside = old[row, (offset - back + taps - 1).clamp_(0, taps - 2)]
        y += torch.where((offset >= back)[:, None], inside, outside).float() * weight[:, -1 - back].float()
    if bias is not None:
        y += bias.float()
    state[pages] = torch.where(rows.is_live[:, None, None], _last_inputs(x, old, rows), before)
    return (torch.nn.functional.silu(y) if silu else y).to(x.dtype)


def _last_inputs(x: torch.Tensor, old: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Of each row behind the step: of x its last ones, or of `old`, what was before. [rows, K - 1, channels]."""
    kept, lengths = old.shape[1], rows.lengths.long()[:, None]
    place = torch.arange(kept, device=x.device)
    own = lengths - kept + place  # which of the row's tokens; below 0: one from before
    inside = x[(rows.query_start[:-1, None] + own).clamp_(0, len(x) - 1)]
    outside = old.gather(1, (lengths + place).clamp_(max=kept - 1)[:, :, None].expand(old.shape))
    return torch.where((own >= 0)[:, :, None], inside, outside)
