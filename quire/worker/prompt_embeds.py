"""Embeddings that came with requests, on their way into the model."""

from __future__ import annotations

import numpy as np
import torch

from quire.models.base import DecoderStack, GivenEmbeddings
from quire.types.plan import PromptEmbeds, StepPlan


def given_embeddings(plan: StepPlan, model: DecoderStack) -> GivenEmbeddings | None:
    """Those of the plan, on the model's device; None if it has none. Does not wait."""
    wanted = next((a for a in plan.attachments if isinstance(a, PromptEmbeds)), None)
    if wanted is None:
        return None
    weight = model.embed_tokens.weight
    starts = (np.cumsum(plan.num_tokens) - plan.num_tokens)[wanted.rows]
    within = np.arange(len(wanted.values)) - np.repeat(np.cumsum(wanted.counts) - wanted.counts, wanted.counts)
    tokens = torch.from_numpy(np.repeat(starts, wanted.counts) + within)
    # What came over a wire is read-only, which torch does not take.
    values = torch.from_numpy(np.require(wanted.values, requirements="W")).to(weight.dtype)
    if weight.device.type == "cpu":
        return GivenEmbeddings(tokens, values)
    tokens, values = (t.pin_memory().to(weight.device, non_blocking=True) for t in (tokens, values))
    return GivenEmbeddings(tokens, values)
