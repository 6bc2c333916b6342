"""torch's fused attention, and the same with scores that get more than a scale, which it does not have."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.attention.scores import ALIKE, PerHead, Scores


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool = False,
    scale: float,
    scores: Scores,
    heads: PerHead = ALIKE,
    behind: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `scaled_dot_product_attention`, and `Scores`; its window is the mask's matter.

    mask: what is seen (bool), or what is added to the scores. is_causal: there are as many keys as queries. heads: of
    each line of queries. behind: see `Scores.behind`; None: causal.

    Shapes:
        q [..., queries, head_dim], or three times that with dual chunks; k, v [..., tokens, head_dim]; mask, behind:
        what broadcasts to [..., queries, tokens]; heads: what broadcasts to [..., queries, 1] each.
    """
    if scores.are_plain:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    if behind is None and (scores.slopes or scores.dual_chunk):
        place = torch.arange(k.shape[-2], device=q.device)
        behind = scores.behind(place, place[: q.shape[-2], None])
    weights = _products(q, k, scores, behind).float().mul_(scale)
    if scores.softcap:
        weights.div_(scores.softcap).tanh_().mul_(scores.softcap)
    if heads.slopes is not None and behind is not None:
        weights.add_(heads.slopes * behind)
    if is_causal:
        mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=q.device).tril_()
    if mask is not None:
        weights = weights.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else weights.add_(mask)
    if heads.sinks is not None:
        sinks = heads.sinks.expand(*weights.shape[:-1], 1)
        weights = torch.cat([weights, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = weights.softmax(-1)
    return weights.to(v.dtype) @ v


def _products(q: torch.Tensor, k: torch.Tensor, scores: Scores, behind: torch.Tensor | None) -> torch.Tensor:
    """Of queries and keys, [..., queries, tokens]."""
    keys = k.transpose(-1, -2)
    if not scores.dual_chunk:
        return q @ keys
    assert behind is not None
    own, before, others = (part @ keys for part in q.chunk(3, -1))
    return torch.where(behind == 0, own, torch.where(behind == -1, before, others))
