"""State space duality (Dao and Gu, Mamba-2, 2024): a state of each head, [head_dim, state], that decays by one number
a token. h = exp(dt · A) h + dt · x Bᵀ; y = h C + D x.

A decode row takes one step of it. Rows of more tokens are cut into pieces, within which the scan is a masked product
of C and B, and from one to the next goes the state.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.recurrent.rows import Rows
from quire.kernels.recurrent.scan import Pieces, hand_on, read_states, write_states
from quire.kernels.recurrent.weights import SSDWeights as SSDWeights  # for layers


def ssd(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    weights: SSDWeights,
    state: torch.Tensor,
    rows: Rows,
    entry: int,
) -> torch.Tensor:
    """One step of every row; the states follow in place.

    Args:
        b, c: of groups of heads.
        dt: before its bias and the softplus.
        state: by page.
        entry: which of a row's pages has it.

    Shapes:
        x: [tokens, heads, head_dim]. b, c: [tokens, groups, state]. dt: [tokens, heads]. state: float32 [pages, heads,
        head_dim, state]. Returns [tokens, heads, head_dim] of x's type.
    """
    if on_triton(x):
        from quire.kernels.recurrent.triton import ssd as triton_ssd

        return triton_ssd.ssd(x, b, c, dt, weights, state, rows, entry)
    steps = torch.nn.functional.softplus(dt.float() + weights.dt_bias).clamp(*weights.limit)
    a = -torch.exp(weights.a_log)
    states = read_states(state, rows, entry)
    out = x.new_zeros(len(x) + 1, *x.shape[1:])
    each = x.shape[1] // b.shape[1]
    decodes = rows.num_decodes
    if decodes:
        one = slice(0, decodes)
        wide_b, wide_c = (part[one].float().repeat_interleave(each, 1) for part in (b, c))
        decay = torch.exp(steps[one] * a)[..., None, None]
        added = (steps[one, :, None] * x[one].float())[..., None] * wide_b[:, :, None]
        states[one] = states[one] * decay + added
        y = (states[one] @ wide_c[..., None])[..., 0] + weights.d[:, None] * x[one].float()
        out[one] = y.to(x.dtype)
    if rows.chunks is not None:
        _chunks(x, b, c, steps, a, weights.d, states, rows, out)
    write_states(state, states, rows, entry)
    return out[:-1]


def _chunks(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    steps: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
) -> None:
    """A place that holds no token has a step of 0: nothing decays there and nothing is added."""
    assert rows.chunks is not None
    pieces = Pieces(rows.chunks, len(x))
    each = x.shape[1] // b.shape[1]
    wide_x, dt = pieces.lay(x).float(), pieces.lay(steps)
    wide_b, wide_c = (pieces.lay(part).float().transpose(1, 2) for part in (b, c))  # [pieces, groups, tokens, state]
    total = (dt * a).cumsum(1).transpose(1, 2)  # [pieces, heads, tokens]
    decay = torch.exp((total[..., :, None] - total[..., None, :]).tril()).tril()
    scores = (wide_c @ wide_b.transpose(-1, -2)).repeat_interleave(each, 1) * decay
    scaled = (wide_x * dt[..., None]).transpose(1, 2)  # [pieces, heads, tokens, dim]
    y = scores @ scaled
    wide_b, wide_c = (part.repeat_interleave(each, 1) for part in (wide_b, wide_c))
    rest = torch.exp(total[..., -1:] - total)[..., None]
    added = (scaled * rest).transpose(-1, -2) @ wide_b  # [pieces, heads, dim, state]
    whole = torch.exp(total[..., -1])[..., None, None]
    before = hand_on(states, rows.chunks, lambda states, piece: states * whole[piece] + added[piece])
    y += torch.exp(total)[..., None] * (wide_c @ before.transpose(-1, -2))
    y = y.transpose(1, 2) + d[:, None] * wide_x
    pieces.back(y, out)
