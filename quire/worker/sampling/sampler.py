"""Sampler: logits to tokens, each row by its own request's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from quire.distributed.peer_memory import PeerMemory
from quire.kernels.dispatch import device_on_cuda
from quire.kernels.sampling import sampling as kernels
from quire.kernels.sampling.sampling import History, Scratch
from quire.platforms.transfers import upload
from quire.types.kv import PAD_SEAT
from quire.types.plan import Admit, TokenMasks
from quire.worker.sampling.apart import ApartDraws
from quire.worker.sampling.columns import Columns, Features
from quire.worker.sampling.custom import CustomProcessors
from quire.worker.sampling.logprobs import LogprobTensors, gather_logprobs
from quire.worker.sampling.masks import Masks
from quire.worker.sampling.processors import PROCESSORS, Processor, RowState

__all__ = ["Features", "History", "Sampler", "SamplerOutput"]

_SLICE_BYTES = 64 * 1024**2  # of logits that are edited, or whose log-probabilities are taken, at once
_MAX_PREPARED = 16  # batches of one set of seats whose lists stay on the device


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    token_ids: torch.Tensor  # int32 [rows, 1]
    logprobs: LogprobTensors | None  # lines name rows of this step's logits; only rows that want them


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Of a slice of rows, on the device."""

    processors: list[Processor]
    lines: list[_Lines]


@dataclass(frozen=True, slots=True)
class _Lines:
    """Rows that want log-probabilities of one kind."""

    count: int
    rows: torch.Tensor  # int64
    counts: torch.Tensor  # int32: how many, the sampled token's own included
    k: int  # the most top log-probabilities any row wants
    listed: torch.Tensor | None  # int64 [rows, ids]: those that are wanted instead


class Sampler:
    """Owns the sampling state of all seats. Nothing here waits for the device.

    `sample_plain` is all that greedy and temperature sampling need and fits in a CUDA graph; `sample` does the rest.
    Order of work: masks, allowed ids, bad words, min_tokens, logit_bias, logits processors, penalties, temperature,
    min-p, top-k, top-p, draw.
    Log-probabilities are the model's own, before any of it.
    """

    def __init__(
        self,
        max_seats: int,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        custom: CustomProcessors | None = None,
        peers: PeerMemory | None = None,
    ) -> None:
        """peers: of ranks that draw the tokens of plain steps together; None: this one draws them all."""
        self.vocab_size = vocab_size
        self._device = device
        self.columns = Columns(max_seats, vocab_size, device)
        self._custom = custom
        self._slice_rows = max(1, min(max_rows, _SLICE_BYTES // (4 * vocab_size)))
        self._scratch: Scratch | None = None
        self.apart = ApartDraws(self.columns, peers) if peers else None
        if device_on_cuda(device):
            self._scratch = Scratch.allocate(max_rows, self._slice_rows, vocab_size, device)
        self._cache: dict[bytes, _Prepared] = {}  # by seats, of one generation of the columns
        self._generation = 0

    def admit(self, admits: list[Admit]) -> None:
        """Take over the parameters of newly seated requests."""
        self.columns.admit(admits)
        if self._custom and admits:
            self.columns.mark_custom(self._custom.admit(admits))

    def custom_seats(self, admits: list[Admit]) -> list[int]:
        """Those among the seats admitted last that want logits processors."""
        return self.columns.custom_seats([admit.seat for admit in admits])

    def take_failures(self, seats: np.ndarray) -> dict[int, str]:
        """What logits processors have done wrong with these, by seat."""
        return self._custom.take_failures(seats) if self._custom else {}

    def features(self, seats: np.ndarray) -> Features:
        """What the rows of these seats want, at the price of one numpy reduction."""
        return self.columns.features(seats)

    def masks(self, masks: TokenMasks | None, sample_rows: np.ndarray | None) -> Masks | None:
        """Bring masks to the device; None if nothing is forbidden.

        sample_rows: the plan row of each row of the logits, rising; None if they are the same.
        """
        if masks is None or not len(masks.rows):
            return None
        rows = masks.rows if sample_rows is None else np.searchsorted(sample_rows, masks.rows).astype(np.int32)
        # What came over a wire is read-only, which torch does not take.
        return Masks(rows, *(self._upload(np.require(values, requirements="W")) for values in (rows, masks.bits)))

    def sample_plain(
        self,
        logits: torch.Tensor,
        seats: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        *,
        filtered: bool = False,
    ) -> None:
        """Greedy or temperature sampling into `out`, with `filtered` also top-k, top-p and min-p; capturable.

        logits: float32 [rows, vocab]; seats, lengths, out: int32 [rows]. lengths: tokens the request has so far.
        """
        kernels.sample(logits, self.columns.device, seats, lengths, out, self._scratch, filtered=filtered)

    def sample(
        self,
        logits: torch.Tensor,
        seats: torch.Tensor,
        lengths: torch.Tensor,
        history: History,
        features: Features,
        seats_np: np.ndarray,
        masks: Masks | None = None,
        queries: int = 1,
    ) -> SamplerOutput:
        """Sample with everything the rows ask for. May overwrite `logits`.

        logits: float32 [rows, vocab]; seats, lengths: int32 [rows]; seats_np: the same seats on the host.
        queries: rows in a row that are one request's, for several tokens; a logits processor is shown the first alone.
        Call it once for each token that is sampled (min_tokens is counted).
        """
        rows = len(seats_np)
        shown = seats_np if queries == 1 else np.where(np.arange(rows) % queries == 0, seats_np, PAD_SEAT)
        out = torch.empty(rows, dtype=torch.int32, device=logits.device)
        lines: list[LogprobTensors] = []
        edits = features.edits or masks is not None
        if edits or features.logprobs:
            for start in range(0, rows, self._slice_rows):
                part = slice(start, min(start + self._slice_rows, rows))
                raw, prepared = logits[part], self._prepared(seats_np[part], features)
                # Log-probabilities are of the logits as they were, so these are kept until the slice has its tokens.
                edited = raw.clone() if edits and features.logprobs else raw
                if masks is not None:
                    masks.apply(edited, start)
                if features.edits:
                    self._edit(edited, seats[part], lengths[part], history, features, prepared, shown[part])
                if masks is not None and features.custom:
                    masks.apply(edited, start)  # what a grammar forbids stays forbidden, whatever they have raised
                if features.logprobs:
                    self.sample_plain(edited, seats[part], lengths[part], out[part], filtered=features.filter)
                    kinds = prepared.lines if prepared else ()
                    lines += [_logprobs(raw, out[part], wanted, start) for wanted in kinds]
        if not features.logprobs:
            self.sample_plain(logits, seats, lengths, out, filtered=features.filter)
        self.columns.count_samples(seats_np)
        return SamplerOutput(out.unsqueeze(1), LogprobTensors.concat(lines) if lines else None)

    def _edit(
        self,
        logits: torch.Tensor,
        seats: torch.Tensor,
        lengths: torch.Tensor,
        history: History,
        features: Features,
        prepared: _Prepared | None,
        seats_np: np.ndarray,
    ) -> None:
        """Lists, logits processors and penalties, in place, of a slice of rows."""
        if prepared:
            state = RowState(self.columns.device[seats.long()], seats.long(), lengths.long(), history)
            for processor in prepared.processors:
                processor.apply(logits, state)
        if features.custom and self._custom:
            self._custom.apply(logits, seats_np, history)
        if features.penalties:
            kernels.penalize(logits, self.columns.device, seats, lengths, history, self._scratch)

    def _prepared(self, seats_np: np.ndarray, features: Features) -> _Prepared | None:
        """What the lists and log-probabilities of these rows need on the device; made anew after an admit."""
        if not (features.lists or features.logprobs):
            return None
        if self._generation != self.columns.generation:
            self._cache.clear()
            self._generation = self.columns.generation
        key = seats_np.tobytes()
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= _MAX_PREPARED:
                self._cache.clear()
            found = self._cache[key] = self._prepare(seats_np)
        return found

    def _prepare(self, seats_np: np.ndarray) -> _Prepared:
        lists = self.columns.lists
        rows = [(row, lists[seat]) for row, seat in enumerate(seats_np.tolist()) if seat in lists]
        processors = (kind.build(rows, self.vocab_size, self._upload) for kind in PROCESSORS)
        return _Prepared(
            processors=[processor for processor in processors if processor is not None],
            lines=[*self._best_lines(seats_np), *self._listed_lines(seats_np)],
        )

    def _best_lines(self, seats_np: np.ndarray) -> Iterator[_Lines]:
        wanted = self.columns.num_logprobs_np[seats_np]
        rows = np.flatnonzero(wanted >= 0)
        if len(rows):
            yield _Lines(len(rows), self._upload(rows), self._upload(wanted[rows] + 1), int(wanted.max()), None)

    def _listed_lines(self, seats_np: np.ndarray) -> Iterator[_Lines]:
        listed = self.columns.listed
        rows = [row for row, seat in enumerate(seats_np.tolist()) if seat in listed]
        if not rows:
            return
        ids = [listed[seat] for seat in seats_np[rows].tolist()]
        counts = np.array([len(wanted) for wanted in ids], dtype=np.int32)
        padded = np.zeros((len(rows), counts.max()), dtype=np.int64)
        for line, wanted in zip(padded, ids, strict=True):
            line[: len(wanted)] = wanted
        yield _Lines(
            len(rows), self._upload(np.array(rows, np.int64)), self._upload(counts + 1), 0, self._upload(padded)
        )

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return upload(torch.from_numpy(values), self._device)


def _logprobs(raw: torch.Tensor, token_ids: torch.Tensor, wanted: _Lines, first_row: int) -> LogprobTensors:
    if wanted.count < len(raw):
        raw, token_ids = raw.index_select(0, wanted.rows), token_ids.index_select(0, wanted.rows)
    return gather_logprobs(raw, token_ids, wanted.k, wanted.rows + first_row, wanted.counts, wanted.listed)
