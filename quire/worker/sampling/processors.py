"""Edits of logits that come from lists of token ids: allowed ids, bad words, min_tokens, logit_bias.

A processor is built on the host for the rows of a step (and kept while the same rows are seated), then applied on
the device to all of them at once. `PROCESSORS` is the order of work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quire.kernels.sampling.sampling import Column, History
from quire.types.sampling import SamplingParams

Upload = Callable[[np.ndarray], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The lists of one request, ids outside the vocabulary dropped."""

    allowed: np.ndarray | None  # int64, sorted, distinct
    bad_words: list[list[int]]
    stops: np.ndarray  # int64
    biased: np.ndarray  # int64, distinct
    biases: np.ndarray  # float32

    @staticmethod
    def of(params: SamplingParams, stop_token_ids: Sequence[int], vocab_size: int) -> TokenLists:
        def known(ids: Sequence[int]) -> np.ndarray:
            found = np.unique(np.asarray(ids, dtype=np.int64))
            return found[(found >= 0) & (found < vocab_size)]

        allowed = None if params.allowed_token_ids is None else known(params.allowed_token_ids)
        bias = {token: value for token, value in (params.logit_bias or {}).items() if 0 <= token < vocab_size}
        return TokenLists(
            allowed=allowed,
            bad_words=[word for word in params.bad_words_token_ids if word and 0 <= word[-1] < vocab_size],
            stops=known(stop_token_ids) if params.min_tokens else known(()),
            biased=np.fromiter(bias.keys(), dtype=np.int64, count=len(bias)),
            biases=np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
        )

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        return params.min_tokens > 0 or TokenLists.wanted_always(params)

    @staticmethod
    def wanted_always(params: SamplingParams) -> bool:
        """Some list besides the stop tokens, which only matter until min_tokens."""
        return params.allowed_token_ids is not None or bool(params.bad_words_token_ids) or bool(params.logit_bias)


@dataclass(frozen=True, slots=True)
class RowState:
    """The rows on the device, [rows] each."""

    columns: torch.Tensor  # int32 [rows, len(Column)]
    seats: torch.Tensor  # int64
    lengths: torch.Tensor  # int64
    history: History


class Processor(Protocol):
    @classmethod
    def build(cls, rows: list[tuple[int, TokenLists]], vocab_size: int, upload: Upload) -> Processor | None:
        """rows: (row, its lists). None if no row needs this processor."""
        ...

    def apply(self, logits: torch.Tensor, state: RowState) -> None:
        """Edit logits, float32 [rows, vocab], in place. Rows are contiguous; they may lie apart."""
        ...


def _ragged(rows: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Row number and id of every entry, int64 both."""
    lengths = [len(ids) for _, ids in rows]
    return np.repeat(np.array([row for row, _ in rows], dtype=np.int64), lengths), np.concatenate([i for _, i in rows])


@dataclass(frozen=True, slots=True)
class AllowedIds:
    """All other ids become -inf."""

    rows: torch.Tensor  # int64 [n]
    index: torch.Tensor  # int64 [allowed ids]: place in the flat logits

    @classmethod
    def build(cls, rows: list[tuple[int, TokenLists]], vocab_size: int, upload: Upload) -> AllowedIds | None:
        wanted = [(row, lists.allowed) for row, lists in rows if lists.allowed is not None]
        if not wanted:
            return None
        row, ids = _ragged(wanted)
        return cls(upload(np.array([row for row, _ in wanted], dtype=np.int64)), upload(row * vocab_size + ids))

    def apply(self, logits: torch.Tensor, state: RowState) -> None:  # noqa: ARG002
        flat, index = _flat(logits, self.index)
        kept = flat[index]
        logits.index_fill_(0, self.rows, -math.inf)
        flat[index] = kept


@dataclass(frozen=True, slots=True)
class BadWords:
    """The last token of a word becomes -inf where the history ends with the tokens before it."""

    rows: torch.Tensor  # int64 [words]
    index: torch.Tensor  # int64 [words]: place of the last token in the flat logits
    prefix: torch.Tensor  # int64 [words, longest]: the tokens before it, right-aligned
    prefix_len: torch.Tensor  # int64 [words]

    @classmethod
    def build(cls, rows: list[tuple[int, TokenLists]], vocab_size: int, upload: Upload) -> BadWords | None:
        words = [(row, word) for row, lists in rows for word in lists.bad_words]
        if not words:
            return None
        longest = max(len(word) for _, word in words) - 1
        prefix = np.zeros((len(words), longest), dtype=np.int64)
        for line, (_, word) in zip(prefix, words, strict=True):
            line[longest - len(word) + 1 :] = word[:-1]
        return cls(
            rows=upload(np.array([row for row, _ in words], dtype=np.int64)),
            index=upload(np.array([row * vocab_size + word[-1] for row, word in words], dtype=np.int64)),
            prefix=upload(prefix),
            prefix_len=upload(np.array([len(word) - 1 for _, word in words], dtype=np.int64)),
        )

    def apply(self, logits: torch.Tensor, state: RowState) -> None:
        longest = self.prefix.shape[1]
        back = torch.arange(longest, 0, -1, device=logits.device)  # distance from the end of the history
        lengths = state.lengths[self.rows]
        tokens = state.history.at(state.seats[self.rows], (lengths.unsqueeze(1) - back).clamp(min=0))
        equal = (tokens == self.prefix) | (back > self.prefix_len.unsqueeze(1))
        banned = equal.all(1) & (lengths >= self.prefix_len)
        _forbid(logits, self.index, banned)


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Stop tokens are -inf until the output has min_tokens."""

    rows: torch.Tensor  # int64 [stops]
    index: torch.Tensor  # int64 [stops]

    @classmethod
    def build(cls, rows: list[tuple[int, TokenLists]], vocab_size: int, upload: Upload) -> MinTokens | None:
        wanted = [(row, lists.stops) for row, lists in rows if len(lists.stops)]
        if not wanted:
            return None
        row, ids = _ragged(wanted)
        return cls(upload(row), upload(row * vocab_size + ids))

    def apply(self, logits: torch.Tensor, state: RowState) -> None:
        num_output = state.lengths - state.columns[:, Column.NUM_PROMPT]
        _forbid(logits, self.index, (num_output < state.columns[:, Column.MIN_TOKENS])[self.rows])


@dataclass(frozen=True, slots=True)
class LogitBias:
    index: torch.Tensor  # int64 [biased ids]
    biases: torch.Tensor  # float32 [biased ids]

    @classmethod
    def build(cls, rows: list[tuple[int, TokenLists]], vocab_size: int, upload: Upload) -> LogitBias | None:
        wanted = [(row, lists.biased) for row, lists in rows if len(lists.biased)]
        if not wanted:
            return None
        row, ids = _ragged(wanted)
        biases = np.concatenate([lists.biases for _, lists in rows if len(lists.biased)])
        return cls(upload(row * vocab_size + ids), upload(biases))

    def apply(self, logits: torch.Tensor, state: RowState) -> None:  # noqa: ARG002
        flat, index = _flat(logits, self.index)
        flat.index_add_(0, index, self.biases)


def _forbid(logits: torch.Tensor, index: torch.Tensor, forbidden: torch.Tensor) -> None:
    """-inf at the places whose `forbidden` is true. Adding lets a place appear twice without a race."""
    flat, index = _flat(logits, index)
    flat.index_add_(0, index, torch.where(forbidden, -math.inf, 0.0))


def _flat(logits: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The memory of all rows in one piece, and where in it those numbers are whose places among rows * vocab `index`
    has: rows may lie apart."""
    (rows, vocab), apart = logits.shape, logits.stride(0)
    flat = logits.as_strided(((rows - 1) * apart + vocab,), (1,))
    return flat, index if apart == vocab else index + index // vocab * (apart - vocab)


PROCESSORS: list[type[Processor]] = [AllowedIds, BadWords, MinTokens, LogitBias]
