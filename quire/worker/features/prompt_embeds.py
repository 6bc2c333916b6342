"""Embeddings that came with requests, on their way into the model."""

from __future__ import annotations

import numpy as np
import torch

from quire.models.base import GivenEmbeddings
from quire.platforms.transfers import upload
from quire.types.plan import PromptEmbeds, StepPlan
from quire.worker.features.base import StepFeature


class PromptEmbeddings(StepFeature):
    def before_forward(self, plan: StepPlan, wanted: PromptEmbeds) -> GivenEmbeddings:
        """Those of the plan, on the model's device."""
        weight = next(self.setup.model.parameters())  # of the embeddings
        starts = (np.cumsum(plan.num_tokens) - plan.num_tokens)[wanted.rows]
        within = np.arange(len(wanted.values)) - np.repeat(np.cumsum(wanted.counts) - wanted.counts, wanted.counts)
        tokens = torch.from_numpy(np.repeat(starts, wanted.counts) + within)
        # What came over a wire is read-only, which torch does not take.
        values = torch.from_numpy(np.require(wanted.values, requirements="W")).to(weight.dtype)
        return GivenEmbeddings(*(upload(tensor, weight.device) for tensor in (tokens, values)))
