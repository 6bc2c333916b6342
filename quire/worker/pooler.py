"""From the states of a step's tokens to vectors: of whole prompts, also when these come in chunks, or of each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.models.pooling import PoolingModel
from quire.platforms.transfers import upload
from quire.types.plan import Pool, StepPlan
from quire.types.pooling import WHOLE

_PIECE = 1024  # tokens that go at once through a head which makes much of each, a number for every word


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
            self._carry = torch.zeros(max_seats + 1, model.pooled_size, dtype=torch.float32, device=device)

    def pool(self, plan: StepPlan, wanted: Pool, hidden: torch.Tensor, num_computed: np.ndarray) -> list[PooledTensors]:
        """hidden [tokens, hidden] of the step; num_computed: of each plan row, before it."""
        lengths = plan.num_tokens
        ends = np.cumsum(lengths)
        is_whole = wanted.heads == WHOLE
        whole, done = wanted.rows[is_whole], wanted.rows[is_whole & wanted.ends]
        found = []
        if self._model.mode == "last" and len(done):
            states = self._model.states(hidden.index_select(0, self._upload(ends[done] - 1)))
            found.append(PooledTensors(done, np.ones(len(done), np.int32), self._model.vectors(states)))
        elif self._model.mode != "last" and len(whole):
            pooled = self._over_chunks(plan, whole, hidden, ends, num_computed)
            if len(done) < len(whole):
                pooled = pooled[self._upload(np.flatnonzero(np.isin(whole, done)))]
            values = pooled if self._model.pools_vectors else self._model.vectors(pooled)
            found.append(PooledTensors(done, np.ones(len(done), np.int32), values))
        for head in np.unique(wanted.heads[~is_whole]).tolist():
            rows = wanted.rows[wanted.heads == head]
            tokens = np.concatenate([np.arange(ends[row] - lengths[row], ends[row]) for row in rows])
            states = self._model.states(hidden.index_select(0, self._upload(tokens)))
            found.append(PooledTensors(rows, lengths[rows], self._model.vectors(states, head)))
        return found

    def _over_chunks(
        self, plan: StepPlan, rows: np.ndarray, hidden: torch.Tensor, ends: np.ndarray, num_computed: np.ndarray
    ) -> torch.Tensor:
        """[rows, size of what is pooled] float32 over all of the rows' tokens so far."""
        lengths, mode, before = plan.num_tokens[rows], self._model.mode, num_computed[rows]
        starts = ends[rows] - lengths
        if mode == "cls":
            part = self._model.states(hidden.index_select(0, self._upload(starts))).float()
        elif self._model.pools_vectors:
            part = torch.stack(
                [
                    self._reduced_vectors(hidden[a : a + n])
                    for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)
                ]
            )
        else:
            if len(rows) < plan.num_rows:
                tokens = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)])
                hidden = hidden.index_select(0, self._upload(tokens))
            states = self._model.states(hidden).float()
            if mode == "weighted":
                places = np.concatenate([np.arange(a, a + n) for a, n in zip(before, lengths, strict=True)])
                states = states * (self._upload(places)[:, None] + 1)
            reduce = "max" if mode == "max" else "sum"
            part = torch.segment_reduce(states, reduce, lengths=self._upload(lengths))
        if self._carry is not None:
            part = self._carried(part, self._carry, plan.seats[rows], before)
        total = before + lengths
        if mode in _SHARES:
            part = part / self._upload(_SHARES[mode](total), torch.float32)[:, None]
        return self._model.finish(part) if self._model.pools_vectors else part

    def _carried(self, part: torch.Tensor, carry: torch.Tensor, seats: np.ndarray, before: np.ndarray) -> torch.Tensor:
        """With what the rows' earlier chunks made."""
        at = self._upload(seats)
        earlier = carry.index_select(0, at)
        if self._model.reduces_by_max:
            earlier = torch.maximum(earlier, part)
        elif self._model.mode != "cls":
            earlier += part
        part = torch.where(self._upload(before == 0).bool()[:, None], part, earlier)
        carry.index_copy_(0, at, part)
        return part

    def _reduced_vectors(self, hidden: torch.Tensor) -> torch.Tensor:
        """The sum, or the largest of each column, of one row's vectors."""
        found = []
        for piece in hidden.split(_PIECE):
            vectors = self._model.vectors(self._model.states(piece))
            found.append(vectors.amax(0) if self._model.reduces_by_max else vectors.sum(0))
        parts = torch.stack(found)
        return parts.amax(0) if self._model.reduces_by_max else parts.sum(0)

    def _upload(self, values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return upload(torch.from_numpy(values).to(dtype), self._device)


# What sums are divided by, of the number of tokens.
_SHARES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda n: n,
    "late": lambda n: n,
    "weighted": lambda n: n * (n + 1) / 2,
    "root": np.sqrt,
}
