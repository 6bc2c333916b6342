"""Which experts a token goes to, and with what weights: from a router's logits, on the device, without a wait.

Rules: softmax and top-k (Shazeer et al., 2017; Fedus et al., 2021), groups of experts of which only the best are open
(DeepSeek-V2, 2024), sigmoids with a bias that takes part in the choice alone (DeepSeek-V3, 2024), sparse mixer (Liu et
al., 2023, as PhiMoE has it).
"""

from __future__ import annotations

import torch

from quire.kernels.dispatch import on_triton
from quire.kernels.moe.routes import Here, Live, Routes, Rule

__all__ = ["Here", "Live", "Routes", "Rule", "route", "route_reference", "to_slots"]


def route(
    logits: torch.Tensor,
    rule: Rule,
    bias: torch.Tensor | None = None,
    live: Live | None = None,
    here: Here | None = None,
) -> Routes:
    """logits float32 [tokens, experts] → routes. bias: float32 [experts], added to the scores for the choice alone.
    here: experts are spread over ranks, and it counts what is chosen."""
    if on_triton(logits) and rule.scoring != "sparse_mixer":
        from quire.kernels.moe.triton import routing

        return routing.route(logits, rule, bias, live, here)
    routes = route_reference(logits, rule, bias, live)
    if here is not None:
        routes = to_slots(routes, here)
    if on_triton(logits):
        from quire.kernels.moe.triton import routing

        return routing.sort(routes, rule.experts, here)
    return routes


def to_slots(routes: Routes, here: Here) -> Routes:
    """Of choices among all experts those that are this rank's, in plain torch."""
    chosen, there = routes.experts.clamp(min=0).long(), routes.experts >= 0
    here.loads.index_add_(0, chosen.flatten(), there.flatten().int())
    token = torch.arange(len(chosen), dtype=torch.int32, device=chosen.device)[:, None]
    slots = torch.where(there, here.slots[chosen, (token % here.copies[chosen]).long()], -1)
    return Routes(slots, routes.weights.masked_fill(slots < 0, 0.0))


def route_reference(
    logits: torch.Tensor, rule: Rule, bias: torch.Tensor | None = None, live: Live | None = None
) -> Routes:
    """The same in plain torch."""
    if rule.scoring == "sparse_mixer":
        weights, chosen = _sparse_mixer(logits, rule)
    else:
        scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
        choice = scores if bias is None else scores + bias
        if rule.top_groups < rule.groups:
            choice = _open_groups(choice, rule)
        chosen = choice.topk(rule.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if rule.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=rule.least_sum)
        weights = weights * rule.scale
    experts = chosen.to(torch.int32)
    if live is not None:
        dead = (live.slots < live.first)[:, None]
        experts, weights = experts.masked_fill(dead, -1), weights.masked_fill(dead, 0.0)
    return Routes(experts, weights.contiguous())


def _open_groups(choice: torch.Tensor, rule: Rule) -> torch.Tensor:
    grouped = choice.unflatten(-1, (rule.groups, -1))
    best = grouped.topk(rule.group_best, dim=-1).values.sum(-1)
    closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, best.topk(rule.top_groups, dim=-1).indices, False)
    opened: torch.Tensor = grouped.masked_fill(closed[..., None], -torch.inf)
    return opened.flatten(-2)


def _sparse_mixer(logits: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """The best, weighted against those near it; then the same without it. Distances are relative to the logits as they
    were, weights are of what is left."""
    left, chosen, weights = logits, [], []
    for _ in range(rule.top_k):
        most, index = left.max(-1, keepdim=True)
        far = (most - logits) / logits.abs().clamp(min=most) > 2 * rule.jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(weights, -1), torch.cat(chosen, -1)
