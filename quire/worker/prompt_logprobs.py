"""Log-probabilities of prompt tokens, chunk by chunk.

A chunk's last hidden state predicts the first token of the *next* chunk, so it is kept for one step.
"""

from __future__ import annotations

import torch

from quire.models.base import DecoderStack
from quire.types.plan import Admit, StepPlan
from quire.worker.sampling.logprobs import LogprobTensors, prompt_logprobs

_SLICE_BYTES = 256 * 1024**2  # of logits at a time


class PromptLogprobs:
    """Knows which seats want prompt log-probabilities, and their last hidden state."""

    def __init__(self, model: DecoderStack, vocab_size: int) -> None:
        self._model = model
        self._slice = max(1, _SLICE_BYTES // (4 * vocab_size))
        self._wanted: dict[int, tuple[int, int]] = {}  # seat → (k, prompt length)
        self._last_hidden: dict[int, torch.Tensor] = {}
        self._seen: dict[int, int] = {}  # seat → prompt tokens behind us

    def admit(self, admits: list[Admit], releases: list[int]) -> None:
        for seat in releases:
            self._forget(seat)
        for admit in admits:
            self._forget(admit.seat)
            if admit.params.prompt_logprobs is not None:
                self._wanted[admit.seat] = admit.params.prompt_logprobs, admit.num_prompt
                self._seen[admit.seat] = admit.num_computed

    def _forget(self, seat: int) -> None:
        for table in (self._wanted, self._last_hidden, self._seen):
            table.pop(seat, None)

    def run(self, plan: StepPlan, hidden: torch.Tensor, input_ids: torch.Tensor) -> LogprobTensors | None:
        """hidden: [tokens, hidden] of the step; one line for every prompt token of it but the very first."""
        if not self._wanted:
            return None
        lines: list[LogprobTensors] = []
        start = 0
        for row, (seat, count) in enumerate(zip(plan.seats.tolist(), plan.num_tokens.tolist(), strict=True)):
            if seat in self._wanted and self._seen[seat] < self._wanted[seat][1]:
                lines += self._chunk(row, seat, hidden[start : start + count], input_ids[start : start + count])
            start += count
        return LogprobTensors.concat(lines) if lines else None

    def _chunk(self, row: int, seat: int, hidden: torch.Tensor, ids: torch.Tensor) -> list[LogprobTensors]:
        k, num_prompt = self._wanted[seat]
        inside = min(len(ids), num_prompt - self._seen[seat])  # the rest is output being recomputed
        before, ids = hidden[: inside - 1], ids[:inside]
        if self._seen[seat]:
            before = torch.cat([self._last_hidden[seat], before])
        else:
            ids = ids[1:]
        self._seen[seat] += inside
        self._last_hidden[seat] = hidden[inside - 1 : inside].clone()
        parts = []
        for i in range(0, len(ids), self._slice):
            logits = self._model.logits(before[i : i + self._slice])
            parts.append(prompt_logprobs(logits, ids[i : i + self._slice], k, row))
        return parts
