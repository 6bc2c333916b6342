"""The gated delta rule (Yang et al., Gated DeltaNet, 2024): a state of each head, [key, value], that decays and in
which what a key stands for is corrected towards its value. S = exp(g) S; S = S + beta · k (v - kᵀ S)ᵀ; y = qᵀ S.

A decode row takes one step of it. Rows of more tokens are cut into pieces: within one, a triangular system says what
each token corrects (the UT transform of Yang et al., DeltaNet, 2024), and from one to the next goes the state.
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.recurrent.rows import Rows
from quire.kernels.recurrent.scan import Pieces, hand_on, read_states, write_states
from quire.kernels.recurrent.weights import DeltaWeights as DeltaWeights  # for layers

_EPS = 1e-6


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: DeltaWeights,
    state: torch.Tensor,
    rows: Rows,
    entry: int,
) -> torch.Tensor:
    """One step of every row; the states follow in place. Queries and keys are brought to unit length first, queries
    then divided by the root of it.

    Args:
        a, b: what says how much the state keeps, g = -exp(a_log) · softplus(a + dt_bias), and how much is corrected,
            beta = most · sigmoid(b).
        state: by page.
        entry: which of a row's pages has it.

    Shapes:
        q, k: [tokens, key heads, key]. v: [tokens, heads, value], heads a multiple of the key heads. a, b:
        [tokens, heads]. state: float32 [pages, heads, key, value]. Returns [tokens, heads, value] of v's type.
    """
    if on_triton(v):
        from quire.kernels.recurrent.triton import delta

        return delta.gated_delta(q, k, v, a, b, weights, state, rows, entry)
    decay = -torch.exp(weights.a_log) * torch.nn.functional.softplus(a.float() + weights.dt_bias)
    beta = torch.sigmoid(b.float()) * weights.most
    each = v.shape[1] // q.shape[1]
    q, k = (unit(x).repeat_interleave(each, 1) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    states = read_states(state, rows, entry)
    out = v.new_zeros(len(v) + 1, *v.shape[1:])
    if rows.num_decodes:
        one = slice(0, rows.num_decodes)
        kept = states[one] * torch.exp(decay[one])[..., None, None]
        known = (k[one, :, None] @ kept)[:, :, 0]
        correction = (v[one].float() - known) * beta[one, :, None]
        states[one] = kept + k[one, :, :, None] * correction[:, :, None]
        out[one] = (q[one, :, None] @ states[one])[:, :, 0].to(v.dtype)
    if rows.chunks is not None:
        _chunks(q, k, v, decay, beta, states, rows, out)
    write_states(state, states, rows, entry)
    return out[:-1]


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of x brought to unit length, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)


def _chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
) -> None:
    """A place that holds no token keeps all and corrects nothing."""
    assert rows.chunks is not None
    pieces = Pieces(rows.chunks, len(v))
    q, k, v = (pieces.lay(x).float().transpose(1, 2) for x in (q, k, v))  # [pieces, heads, tokens, …]
    total, beta = pieces.lay(decay).cumsum(1).transpose(1, 2), pieces.lay(beta).transpose(1, 2)[..., None]
    pair = torch.exp((total[..., :, None] - total[..., None, :]).tril()).tril()
    since, rest = torch.exp(total)[..., None], torch.exp(total[..., -1:] - total)[..., None]
    scaled = k * beta
    system = (scaled @ k.transpose(-1, -2)) * pair
    both = torch.linalg.solve_triangular(
        system, torch.cat([v * beta, scaled * since], -1), upper=False, unitriangular=True
    )
    wanted, known = both.split([v.shape[-1], k.shape[-1]], -1)
    whole, left = torch.exp(total[..., -1])[..., None, None], (k * rest).transpose(-1, -2)
    before = hand_on(
        states,
        rows.chunks,
        lambda now, at: now * whole[at] + left[at] @ (wanted[at] - known[at] @ now),
    )
    y = (q * since) @ before + ((q @ k.transpose(-1, -2)) * pair) @ (wanted - known @ before)
    pieces.back(y.transpose(1, 2), out)
