"""The selective scan (Gu and Dao, Mamba, 2023): a state of each channel, each number of which decays at its own rate.
h = exp(dt · A) h + dt · x B; y = C h + D x.

A decode row takes one step of it. Rows of more tokens are cut into pieces, all of which are gone through side by side:
once for what each adds to the state, and once more, each from the state before it, for what comes out.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.scan import Pieces, hand_on, read_states, write_states
from quire.kernels.recurrent.weights import SelectiveWeights as SelectiveWeights  # for layers


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    weights: SelectiveWeights,
    state: torch.Tensor,
    rows: Rows,
    entry: int,
) -> torch.Tensor:
    """One step of every row; the states follow in place.

    Args:
        dt: before the softplus.
        state: by page.
        entry: which of a row's pages has it.

    Shapes:
        x, dt: [tokens, channels]. b, c: [tokens, state]. state: float32 [pages, channels, state]. Returns [tokens,
        channels] of x's type.
    """
    if on_triton(x):
        from quire.kernels.recurrent.triton import selective

        return selective.selective_scan(x, dt, b, c, weights, state, rows, entry)
    steps, wide = torch.nn.functional.softplus(dt.float()), x.float()
    b, c, a = b.float(), c.float(), -torch.exp(weights.a_log)
    states = read_states(state, rows, entry)
    out = torch.zeros(len(x) + 1, x.shape[1], dtype=torch.float32, device=x.device)
    if rows.num_decodes:
        one = slice(0, rows.num_decodes)
        states[one] = _step(states[one], steps[one], wide[one], b[one], a)
        out[one] = (states[one] @ c[one, :, None])[..., 0]
    if rows.chunks is not None:
        _chunks(wide, steps, b, c, a, states, rows, out)
    write_states(state, states, rows, entry)
    y: torch.Tensor = out[:-1] + weights.d * wide
    return y.to(x.dtype)


def _step(states: torch.Tensor, dt: torch.Tensor, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """states [rows, channels, state] one token later: dt, x [rows, channels], b [rows, state]."""
    return states * torch.exp(dt[..., None] * a) + (dt * x)[..., None] * b[:, None]


def _chunks(
    x: torch.Tensor,
    steps: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    states: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
) -> None:
    """A place that holds no token has a step of 0: nothing decays there and nothing is added."""
    assert rows.chunks is not None
    pieces = Pieces(rows.chunks, len(x))
    x, dt, b, c = (pieces.lay(part) for part in (x, steps, b, c))
    places = range(min(CHUNK, rows.max_query_len))
    added = x.new_zeros(len(x), *states.shape[1:])
    for place in places:
        added = _step(added, dt[:, place], x[:, place], b[:, place], a)
    whole = torch.exp(dt.sum(1)[..., None] * a)
    now = hand_on(states, rows.chunks, lambda states, at: states * whole[at] + added[at])
    y = torch.zeros_like(x)
    for place in places:
        now = _step(now, dt[:, place], x[:, place], b[:, place], a)
        y[:, place] = (now @ c[:, place, :, None])[..., 0]
    pieces.back(y, out)
