"""From the states of a step's tokens to vectors: of whole prompts, also when these come in chunks, or of each token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.models.pooling import PoolingModel
from quire.platforms.transfers import upload
from quire.types.plan import Pool, StepPlan


@dataclass(frozen=True, slots=True)
class PooledTensors:
    """See `types.result.PooledRows`; the values are on the device yet."""

    rows: np.ndarray
    counts: np.ndarray
    values: torch.Tensor


class Pooler:
    """Remembers, of each seat whose prompt is not complete, the sum (or maximum, or first state) of its chunks."""

    def __init__(self, model: PoolingModel, max_seats: int, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._carry: torch.Tensor | None = None
        if model.is_causal and model.mode != "last":
            self._carry = torch.zeros(max_seats + 1, model.hidden, dtype=torch.float32, device=device)

    def pool(self, plan: StepPlan, wanted: Pool, hidden: torch.Tensor, num_computed: np.ndarray) -> PooledTensors:
        """hidden [tokens, hidden] of the step; num_computed: of each plan row, before it."""
        lengths = plan.num_tokens
        ends = np.cumsum(lengths)
        whole = wanted.rows[~wanted.per_token]
        done = wanted.rows[~wanted.per_token & wanted.ends]
        by_token = wanted.rows[wanted.per_token]
        parts = []
        if self._model.mode == "last":
            if len(done):
                parts.append(self._model.states(hidden.index_select(0, self._upload(ends[done] - 1))))
        elif len(whole):
            pooled = self._over_chunks(plan, whole, hidden, ends, num_computed)
            if len(done) < len(whole):
                pooled = pooled[self._upload(np.flatnonzero(np.isin(whole, done)))]
            parts.append(pooled)
        if len(by_token):
            tokens = np.concatenate([np.arange(ends[row] - lengths[row], ends[row]) for row in by_token])
            parts.append(self._model.states(hidden.index_select(0, self._upload(tokens))).float())
        if parts:
            values = self._model.vectors(torch.cat(parts) if len(parts) > 1 else parts[0])
        else:
            values = torch.empty(0, 1)  # of a step that ends no prompt
        counts = np.concatenate([np.ones(len(done), np.int32), lengths[by_token]])
        return PooledTensors(np.concatenate([done, by_token]), counts, values)

    def _over_chunks(
        self, plan: StepPlan, rows: np.ndarray, hidden: torch.Tensor, ends: np.ndarray, num_computed: np.ndarray
    ) -> torch.Tensor:
        """[rows, hidden] float32 over all of the rows' tokens so far."""
        lengths, mode = plan.num_tokens[rows], self._model.mode
        starts = ends[rows] - lengths
        if mode == "cls":
            part = self._model.states(hidden.index_select(0, self._upload(starts))).float()
        else:
            if len(rows) < plan.num_rows:
                tokens = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)])
                hidden = hidden.index_select(0, self._upload(tokens))
            states = self._model.states(hidden).float()
            reduce = "max" if mode == "max" else "sum"
            part = torch.segment_reduce(states, reduce, lengths=self._upload(lengths))
        before = num_computed[rows]
        if self._carry is not None:
            seats = self._upload(plan.seats[rows])
            earlier = self._carry.index_select(0, seats)
            if mode == "mean":
                earlier += part
            elif mode == "max":
                earlier = torch.maximum(earlier, part)
            part = torch.where(self._upload(before == 0).bool()[:, None], part, earlier)
            self._carry.index_copy_(0, seats, part)
        if mode == "mean":
            part = part / self._upload(before + lengths)[:, None]
        return part

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return upload(torch.from_numpy(values.astype(np.int64)), self._device)
