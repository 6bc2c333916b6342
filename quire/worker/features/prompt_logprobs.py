"""Log-probabilities of prompt tokens, for the chunks that the plan names."""

from __future__ import annotations

import numpy as np
import torch

from quire.types.plan import PromptLogprobs, StepPlan
from quire.worker.features.base import FeatureSetup, StepFeature
from quire.worker.logit_rows import logit_rows
from quire.worker.sampling.logprobs import LogprobTensors, prompt_logprobs

_SLICE_BYTES = 256 * 1024**2  # of logits at a time


class PromptScorer(StepFeature):
    """Scores a chunk's tokens with the hidden states of the step."""

    def __init__(self, setup: FeatureSetup) -> None:
        super().__init__(setup)
        self._lines = max(1, _SLICE_BYTES // (4 * setup.vocab_size))

    def after_forward(
        self, plan: StepPlan, wanted: PromptLogprobs, hidden: torch.Tensor, input_ids: torch.Tensor
    ) -> LogprobTensors | None:
        """One line a predicted prompt token."""
        ends = np.cumsum(plan.num_tokens)
        parts = []
        for row, next_id, k in zip(*(each.tolist() for each in (wanted.rows, wanted.next_ids, wanted.k)), strict=True):
            end = int(ends[row])
            begin = end - int(plan.num_tokens[row])
            following = input_ids[begin + 1 : end]
            if next_id >= 0:
                following = torch.cat([following, following.new_full((1,), next_id)])
            for i in range(0, len(following), self._lines):
                ids = following[i : i + self._lines]
                tokens = slice(begin + i, begin + i + len(ids))
                with self.setup.narrowed(tokens):
                    logits = logit_rows(len(ids), self.setup.vocab_size, hidden.device)
                    logits = self.setup.model.logits(hidden[tokens], out=logits)
                parts.append(prompt_logprobs(logits, ids, k, row))
        return LogprobTensors.concat(parts) if parts else None
