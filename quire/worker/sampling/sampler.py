"""Sampler: logits to tokens, each row by its own request's parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels import sampling as kernels
from quire.kernels.sampling import History, Scratch
from quire.types.plan import Admit
from quire.worker.sampling.columns import Columns, Features
from quire.worker.sampling.logprobs import LogprobTensors, gather_logprobs
from quire.worker.sampling.processors import PROCESSORS, Processor, RowState

__all__ = ["Features", "History", "Sampler", "SamplerOutput"]

_SLICE_BYTES = 64 * 1024**2  # of logits that are edited, or whose log-probabilities are taken, at once


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    token_ids: torch.Tensor  # int32 [rows, 1]
    logprobs: LogprobTensors | None  # lines name rows of this step's logits; only rows that want them


class Sampler:
    """Owns the sampling state of all seats. Nothing here waits for the device.

    `sample_plain` is all that greedy and temperature sampling need and fits in a CUDA graph; `sample` does the rest.
    Order of work: allowed ids, bad words, min_tokens, logit_bias, penalties, temperature, min-p, top-k, top-p, draw.
    Log-probabilities are the model's own, before any of it.
    """

    def __init__(self, max_seats: int, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._columns = Columns(max_seats, vocab_size, device)
        self._slice_rows = max(1, min(max_rows, _SLICE_BYTES // (4 * vocab_size)))
        self._scratch: Scratch | None = None
        if device.type == "cuda":
            self._scratch = Scratch.allocate(max_rows, self._slice_rows, vocab_size, device)
        self._processors: dict[bytes, list[Processor]] = {}  # by seats, of one generation of the columns
        self._generation = 0

    def admit(self, admits: list[Admit]) -> None:
        """Take over the parameters of newly seated requests."""
        self._columns.admit(admits)

    def features(self, seats: np.ndarray) -> Features:
        """What the rows of these seats want, at the price of one numpy reduction."""
        return self._columns.features(seats)

    def sample_plain(self, logits: torch.Tensor, seats: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
        """Greedy or temperature sampling into `out`; capturable.

        logits: float32 [rows, vocab]; seats, lengths, out: int32 [rows]. lengths: tokens the request has so far.
        """
        kernels.sample(logits, self._columns.device, seats, lengths, out, self._scratch, filtered=False)

    def sample(
        self,
        logits: torch.Tensor,
        seats: torch.Tensor,
        lengths: torch.Tensor,
        history: History,
        features: Features,
        seats_np: np.ndarray,
    ) -> SamplerOutput:
        """Sample with everything the rows ask for. May overwrite `logits`.

        logits: float32 [rows, vocab]; seats, lengths: int32 [rows]; seats_np: the same seats on the host.
        Call it once for each token that is sampled (min_tokens is counted).
        """
        rows = len(seats_np)
        out = torch.empty(rows, dtype=torch.int32, device=logits.device)
        step = self._slice_rows if features.edits or features.logprobs else rows
        lines = []
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            line = self._sample_slice(
                logits[part], seats[part], lengths[part], history, features, seats_np[part], out[part], start
            )
            if line is not None:
                lines.append(line)
        self._columns.count_samples(seats_np)
        return SamplerOutput(out.unsqueeze(1), LogprobTensors.concat(lines) if lines else None)

    def _sample_slice(
        self,
        raw: torch.Tensor,
        seats: torch.Tensor,
        lengths: torch.Tensor,
        history: History,
        features: Features,
        seats_np: np.ndarray,
        out: torch.Tensor,
        first_row: int,
    ) -> LogprobTensors | None:
        logits = raw
        if features.edits:
            if features.logprobs:
                logits = raw.clone()
            if features.lists:
                state = RowState(self._columns.device[seats.long()], seats.long(), lengths.long(), history)
                for processor in self._processors_of(seats_np):
                    processor.apply(logits, state)
            if features.penalties:
                kernels.penalize(logits, self._columns.device, seats, lengths, history, self._scratch)
        kernels.sample(logits, self._columns.device, seats, lengths, out, self._scratch, filtered=features.filter)
        return self._logprobs(raw, out, seats_np, first_row) if features.logprobs else None

    def _processors_of(self, seats_np: np.ndarray) -> list[Processor]:
        """The processors of these rows; built again only when a seat has changed hands."""
        if self._generation != self._columns.generation:
            self._processors.clear()
            self._generation = self._columns.generation
        key = seats_np.tobytes()
        found = self._processors.get(key)
        if found is None:
            if len(self._processors) >= 16:  # other batches of the same seats; device memory is not for hoarding
                self._processors.clear()
            lists = self._columns.lists
            rows = [(row, lists[seat]) for row, seat in enumerate(seats_np.tolist()) if seat in lists]
            built = (kind.build(rows, self.vocab_size, self._upload) for kind in PROCESSORS)
            found = self._processors[key] = [processor for processor in built if processor is not None]
        return found

    def _logprobs(
        self, raw: torch.Tensor, token_ids: torch.Tensor, seats_np: np.ndarray, first_row: int
    ) -> LogprobTensors | None:
        wanted = self._columns.num_logprobs_np[seats_np]
        rows_np = np.flatnonzero(wanted >= 0)
        if len(rows_np) == 0:
            return None
        rows = self._upload(rows_np)
        counts = self._upload(wanted[rows_np] + 1)
        if len(rows_np) < len(seats_np):
            raw, token_ids = raw.index_select(0, rows), token_ids.index_select(0, rows)
        return gather_logprobs(raw, token_ids, int(wanted.max()), rows + first_row, counts)

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        """To the device without waiting: torch's pinned-memory pool keeps the source until the copy has read it."""
        tensor = torch.from_numpy(values)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
