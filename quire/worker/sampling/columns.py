"""What each seat's request wants of sampling: numbers as columns on the device, flags and lists on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.sampling.sampling import Column, seed_key
from quire.kernels.step.step import scatter
from quire.types.plan import Admit
from quire.types.sampling import SamplingParams
from quire.worker.sampling.processors import TokenLists
from quire.worker.staging import ALIGNED, Staging

_FILTER, _PENALTIES, _LISTS, _MIN_TOKENS, _LOGPROBS, _CUSTOM = (1 << bit for bit in range(6))


@dataclass(frozen=True, slots=True)
class Features:
    """What at least one row of a step wants beyond greedy or temperature sampling."""

    filter: bool  # top-k, top-p, min-p
    penalties: bool
    lists: bool  # allowed ids, bad words, min_tokens, logit_bias
    logprobs: bool
    custom: bool  # the engine's own logits processors

    @property
    def plain(self) -> bool:
        return not (self.filter or self.edits or self.logprobs)

    @property
    def draw_only(self) -> bool:
        """`sample_plain` does, with `filtered` if any row filters."""
        return not (self.edits or self.logprobs)

    @property
    def edits(self) -> bool:
        """Logits are changed before sampling."""
        return self.penalties or self.lists or self.custom


_FEATURES = [
    Features(
        filter=bool(flags & _FILTER),
        penalties=bool(flags & _PENALTIES),
        lists=bool(flags & (_LISTS | _MIN_TOKENS)),
        logprobs=bool(flags & _LOGPROBS),
        custom=bool(flags & _CUSTOM),
    )
    for flags in range(64)
]


class Columns:
    """Written once a request, at `admit`; a step only reads.

    device: int32 [max_seats + 1, len(Column)], floats as their bits; row 0 (padding) stays zero.
    """

    def __init__(self, max_seats: int, vocab_size: int, device: torch.device) -> None:
        self.device = torch.zeros(max_seats + 1, len(Column), dtype=torch.int32, device=device)
        self.lists: dict[int, TokenLists] = {}  # of the seats that have any
        self.generation = 0  # grows with every admit: what was derived from the lists is stale then
        self.num_logprobs_np = np.full(max_seats + 1, -1, dtype=np.int32)  # -1: none wanted
        self.listed: dict[int, np.ndarray] = {}  # int64 ids, of the seats that want log-probabilities of these instead
        self._vocab_size = vocab_size
        self._flags_np = np.zeros(max_seats + 1, dtype=np.uint8)
        self._is_plain_np = np.ones(max_seats + 1, dtype=np.bool_)
        self._held_np = np.zeros(max_seats + 1, dtype=np.int32)  # samples that min_tokens may still hold back
        self._staging = Staging(2 * (len(Column) * max_seats + ALIGNED), device)

    def admit(self, admits: list[Admit]) -> None:
        """Copy the rows of newly seated requests to the device: one transfer, one kernel, no wait."""
        if not admits:
            return
        self.generation += 1
        seats = np.array([admit.seat for admit in admits], dtype=np.int32)
        rows = np.zeros((len(admits), len(Column)), dtype=np.int32)
        for row, admit in zip(rows, admits, strict=True):
            self._fill(row, admit)
            self._remember(admit)
        places = seats[:, None] * len(Column) + np.arange(len(Column), dtype=np.int32)
        index, values = self._staging.put(places.ravel()), self._staging.put(rows.ravel())
        self._staging.send()
        scatter(self.device, self._staging.view(index), self._staging.view(values))

    def _fill(self, row: np.ndarray, admit: Admit) -> None:
        params, floats = admit.params, row.view(np.float32)
        row[Column.NUM_PROMPT] = admit.num_prompt
        row[Column.MIN_TOKENS] = params.min_tokens
        row[Column.KEY_LOW], row[Column.KEY_HIGH] = seed_key(admit.seed)
        floats[Column.INV_TEMPERATURE] = 0 if params.is_greedy else 1 / params.temperature
        row[Column.TOP_K] = params.top_k if params.top_k < self._vocab_size else 0
        floats[Column.TOP_P] = params.top_p
        floats[Column.MIN_P_CUT] = params.temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf
        floats[Column.REPETITION] = params.repetition_penalty
        floats[Column.PRESENCE] = params.presence_penalty
        floats[Column.FREQUENCY] = params.frequency_penalty

    def _remember(self, admit: Admit) -> None:
        params, seat = admit.params, admit.seat
        self.lists.pop(seat, None)
        if TokenLists.wanted(params):
            self.lists[seat] = TokenLists.of(params, admit.stop_token_ids, self._vocab_size)
        self._held_np[seat] = params.min_tokens
        self.listed.pop(seat, None)
        if params.logprob_token_ids is not None:
            self.listed[seat] = np.array(params.logprob_token_ids, dtype=np.int64)
        self.num_logprobs_np[seat] = _num_logprobs(params, self._vocab_size)
        penalized = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        self._flags_np[seat] = (
            _FILTER * _is_filtered(params, self._vocab_size)
            | _PENALTIES * bool(penalized)
            | _LISTS * TokenLists.wanted_always(params)
            | _MIN_TOKENS * (params.min_tokens > 0)
            | _LOGPROBS * (params.logprobs is not None)
        )
        self._is_plain_np[seat] = self._flags_np[seat] == 0

    def mark_custom(self, seats: list[int]) -> None:
        """Seats, admitted just now, that want logits processors."""
        self._flags_np[seats] |= np.uint8(_CUSTOM)

    def custom_seats(self, seats: list[int]) -> list[int]:
        return [seat for seat in seats if self._flags_np[seat] & _CUSTOM]

    def features(self, seats: np.ndarray) -> Features:
        return _FEATURES[np.bitwise_or.reduce(self._flags_np[seats], initial=0)]

    def is_plain(self, seats: np.ndarray) -> bool:
        """Whether no request in these seats has ever wanted more than greedy or temperature sampling, but for logits
        processors. Unlike features it is told by what was admitted alone."""
        return bool(self._is_plain_np[seats].all())

    def count_samples(self, seats: np.ndarray) -> None:
        """Seats that have sampled min_tokens since they were admitted need no holding back any more.

        A request that was preempted counts anew; the device compares true lengths, so this only costs time.
        """
        self._held_np[seats] -= 1
        done = seats[self._held_np[seats] <= 0]
        self._flags_np[done] &= ~np.uint8(_MIN_TOKENS)


def _is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    return not params.is_greedy and (0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0)


def _num_logprobs(params: SamplingParams, vocab_size: int) -> int:
    """Top log-probabilities beside the sampled token's own; -1 if none at all are wanted."""
    if params.logprobs is None or params.logprob_token_ids is not None:
        return -1
    return vocab_size if params.logprobs == -1 else min(params.logprobs, vocab_size)
