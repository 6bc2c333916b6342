"""The gated delta rule where every column of keys fades at its own rate (Kimi Delta Attention, 2025): a state of each
head, [key, value]. S = diag(exp(g)) S; S = S + beta · k (v - kᵀ S)ᵀ; y = qᵀ S.

As in `delta.py` rows of several tokens are cut into pieces. What two tokens of a piece have to do with each other is
no product of matrices times a number here, for each column fades by itself. Between blocks of a piece it is one again
once both sides are counted from where the later block begins: neither factor is then above 1. Within a block columns
are summed up one by one.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.recurrent.delta import unit
from quire.kernels.recurrent.rows import CHUNK, Rows
from quire.kernels.recurrent.scan import Pieces, hand_on, read_states, write_states

_BLOCK = 16


def channel_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    rows: Rows,
    entry: int,
) -> torch.Tensor:
    """One step of every row; the states follow in place. Queries and keys are brought to unit length first, queries
    then divided by the root of it.

    Args:
        decay: g, the logarithm of what each column of the state keeps, <= 0.
        beta: how much is corrected.
        state: by page.
        entry: which of a row's pages has it.

    Shapes:
        q, k: [tokens, heads, key]. v: [tokens, heads, value]. decay: float32 [tokens, heads, key]. beta: float32
        [tokens, heads]. state: float32 [pages, heads, key, value]. Returns [tokens, heads, value] of v's type.
    """
    if on_triton(v):
        from quire.kernels.recurrent.triton import channel_delta

        return channel_delta.channel_delta(q, k, v, decay, beta, state, rows, entry)
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    states = read_states(state, rows, entry)
    out = v.new_zeros(len(v) + 1, *v.shape[1:])
    if rows.num_decodes:
        one = slice(0, rows.num_decodes)
        kept = states[one] * torch.exp(decay[one])[..., None]
        known = (k[one, :, None] @ kept)[:, :, 0]
        correction = (v[one].float() - known) * beta[one, :, None]
        states[one] = kept + k[one, :, :, None] * correction[:, :, None]
        out[one] = (q[one, :, None] @ states[one])[:, :, 0].to(v.dtype)
    if rows.chunks is not None:
        pieces = Pieces(rows.chunks, len(v))
        q, k, v, decay = (pieces.lay(x).float().transpose(1, 2) for x in (q, k, v, decay))  # [pieces, heads, tokens, …]
        y = _chunks(q, k, v, decay, pieces.lay(beta).transpose(1, 2)[..., None], states, rows)
        pieces.back(y.transpose(1, 2), out)
    write_states(state, states, rows, entry)
    return out[:-1]


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """A place that holds no token keeps all and corrects nothing."""
    assert rows.chunks is not None
    total = decay.cumsum(2)
    since, whole = torch.exp(total), total[:, :, -1]
    rest = torch.exp(whole[:, :, None] - total)
    both = torch.linalg.solve_triangular(
        _pairs(k, k, total) * beta, torch.cat([v * beta, k * since * beta], -1), upper=False, unitriangular=True
    )
    wanted, known = both.split([v.shape[-1], k.shape[-1]], -1)
    kept, left = torch.exp(whole)[..., None], (k * rest).transpose(-1, -2)
    before = hand_on(
        states,
        rows.chunks,
        lambda now, at: now * kept[at] + left[at] @ (wanted[at] - known[at] @ now),
    )
    y: torch.Tensor = (q * since) @ before + _pairs(q, k, total) @ (wanted - known @ before)
    return y


def _pairs(x: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Σ over columns of x_i · k_j · exp(total_i - total_j), for j <= i, else 0: [pieces, heads, CHUNK, CHUNK]."""
    found = x.new_zeros(*x.shape[:2], CHUNK, CHUNK)
    for first in range(0, CHUNK, _BLOCK):
        own, earlier = slice(first, first + _BLOCK), slice(0, first)
        if first:
            origin = total[:, :, first - 1 : first]
            faded = k[:, :, earlier] * torch.exp(origin - total[:, :, earlier])
            found[:, :, own, earlier] = (x[:, :, own] * torch.exp(total[:, :, own] - origin)) @ faded.transpose(-1, -2)
        apart = (total[:, :, own, None] - total[:, :, None, own]).clamp_(max=0).exp_()
        within = (x[:, :, own, None] * k[:, :, None, own] * apart).sum(-1)
        found[:, :, own, own] = within.tril()
    return found
