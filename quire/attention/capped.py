"""torch's fused attention, and the same with capped scores, which it does not have."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool = False,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """See `scaled_dot_product_attention`; scores become softcap · tanh(score / softcap) unless that is 0.

    mask: what is seen (bool), or what is added to the scores. is_causal: there are as many keys as queries.

    Shapes:
        q [..., queries, head_dim]; k, v [..., tokens, head_dim]; mask: what broadcasts to [..., queries, tokens].
    """
    if not softcap:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float().mul_(scale / softcap).tanh_().mul_(softcap)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril_()
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
    return scores.softmax(-1).to(v.dtype) @ v
