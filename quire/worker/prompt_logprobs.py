"""Log-probabilities of prompt tokens, for the chunks that the plan names."""

from __future__ import annotations

import numpy as np
import torch

from quire.models.base import DecoderStack
from quire.types.plan import Admit, PromptLogprobs, StepPlan
from quire.worker.sampling.logprobs import LogprobTensors, prompt_logprobs

_SLICE_BYTES = 256 * 1024**2  # of logits at a time


class PromptScorer:
    """Scores a chunk's tokens with the hidden states of the step; remembers only how many each seat wants."""

    def __init__(self, model: DecoderStack, vocab_size: int) -> None:
        self._model = model
        self._lines = max(1, _SLICE_BYTES // (4 * vocab_size))
        self._wanted: dict[int, int] = {}  # seat → k

    def admit(self, admits: list[Admit]) -> None:
        for admit in admits:
            if admit.params.prompt_logprobs is not None:
                self._wanted[admit.seat] = admit.params.prompt_logprobs

    def score(
        self, plan: StepPlan, wanted: PromptLogprobs, hidden: torch.Tensor, input_ids: torch.Tensor
    ) -> LogprobTensors | None:
        """hidden: [tokens, hidden] of the step; input_ids: [tokens]. One line a predicted prompt token."""
        ends = np.cumsum(plan.num_tokens)
        parts = []
        for row, next_id in zip(wanted.rows.tolist(), wanted.next_ids.tolist(), strict=True):
            end = int(ends[row])
            begin = end - int(plan.num_tokens[row])
            following = input_ids[begin + 1 : end]
            if next_id >= 0:
                following = torch.cat([following, following.new_full((1,), next_id)])
            k = self._wanted[int(plan.seats[row])]
            for i in range(0, len(following), self._lines):
                ids = following[i : i + self._lines]
                logits = self._model.logits(hidden[begin + i : begin + i + len(ids)])
                parts.append(prompt_logprobs(logits, ids, k, row))
        return LogprobTensors.concat(parts) if parts else None
