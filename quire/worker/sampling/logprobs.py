"""Log-probabilities of the model itself: taken from the logits before anything edits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Lines of log-probabilities on the device; see `types.result.LogprobRows`, which they become."""

    rows: torch.Tensor  # int [lines]
    counts: torch.Tensor  # int [lines]: valid columns
    token_ids: torch.Tensor  # int32 [lines, 1 + k]; column 0: the sampled (or the prompt's own) token
    logprobs: torch.Tensor  # float32 [lines, 1 + k]
    ranks: torch.Tensor  # int32 [lines]: 1 + tokens more likely than column 0

    def with_rows(self, rows: torch.Tensor) -> LogprobTensors:
        return replace(self, rows=rows)

    @staticmethod
    def concat(parts: Sequence[LogprobTensors]) -> LogprobTensors:
        """All lines of the parts in order; narrower parts are widened with columns that do not count."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.token_ids.shape[1] for part in parts)

        def widened(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors])

        return LogprobTensors(
            rows=torch.cat([part.rows for part in parts]),
            counts=torch.cat([part.counts for part in parts]),
            token_ids=widened([part.token_ids for part in parts]),
            logprobs=widened([part.logprobs for part in parts]),
            ranks=torch.cat([part.ranks for part in parts]),
        )


def gather_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    k: int,
    rows: torch.Tensor,
    counts: torch.Tensor,
    listed: torch.Tensor | None = None,
) -> LogprobTensors:
    """logits: [lines, vocab], unprocessed; token_ids, rows, counts: int [lines]; listed: int64 [lines, ids], instead
    of the k best.

    A line without a distribution (NaN, +inf or nothing finite among its logits) gets -inf instead of NaN.
    """
    logits = logits.float()
    own = logits.gather(1, token_ids.long().unsqueeze(1))
    top, top_ids = logits.topk(k, dim=1) if listed is None else (logits.gather(1, listed), listed)
    ranks = (logits > own).sum(1) + 1
    logprobs = torch.cat([own, top], 1) - logits.logsumexp(1, keepdim=True)
    return LogprobTensors(
        rows=rows,
        counts=counts,
        token_ids=torch.cat([token_ids.unsqueeze(1).int(), top_ids.int()], 1),
        logprobs=torch.nan_to_num(logprobs, nan=-math.inf, neginf=-math.inf),
        ranks=ranks.int(),
    )


def prompt_logprobs(logits: torch.Tensor, next_ids: torch.Tensor, k: int, row: int) -> LogprobTensors:
    """Log-probabilities of the prompt's own tokens and the k best at each place; k = -1: the whole vocabulary.

    logits: [lines, vocab]; next_ids: int [lines], the token that follows each; row: the plan row they belong to.
    """
    lines, vocab = logits.shape
    k = vocab if k == -1 else min(k, vocab)

    def all_lines(value: int) -> torch.Tensor:
        return torch.full((lines,), value, dtype=torch.int32, device=logits.device)

    return gather_logprobs(logits, next_ids, k, all_lines(row), all_lines(1 + k))
