"""What a user's own logits processor is, and what it is shown: `quire.LogitsProcessor`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from quire.kernels.sampling.sampling import History
from quire.platforms.transfers import upload
from quire.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ProcessorSetup:
    """What a processor is made with."""

    vocab_size: int
    device: torch.device
    model_path: Path  # folder with the model's files, its tokenizer usually among them


class LogitsProcessor(ABC):
    """Edits the logits of the requests that ask for it. Derive, and override `admit` and one of the two `apply`s.

    One object serves an engine, for all its requests, on one thread. What it remembers of a request belongs in the
    state that `admit` returns. Whatever raises ends the requests it was raised for, and no other.
    """

    def __init__(self, setup: ProcessorSetup) -> None:
        self.setup = setup

    @classmethod  # noqa: B027 (most have nothing to refuse)
    def validate_params(cls, params: SamplingParams) -> None:
        """Refuse, with a ValueError that says why, a request whose `extra_args` cannot work.

        Asked where requests come in, which may be another process than that of the engine.
        """

    def is_argmax_invariant(self) -> bool:
        """Whether it never changes which token is the likeliest; greedy requests are then not shown to it."""
        return False

    @abstractmethod
    def admit(self, params: SamplingParams) -> Any:
        """The state kept for a request that takes a seat, None if the request has no use for this processor.

        A request that was preempted is admitted anew, with tokens that it has sampled already: a state follows from
        `params` and from the tokens that its row shows, and counts nothing by itself.
        """

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor | None:
        """Edit logits on the device, in place or by returning others.

        By then allowed ids, bad words, min_tokens and logit_bias have been applied; penalties, temperature and what
        follows it have not. Tokens that a grammar forbids stay forbidden.

        Args:
            logits: of the rows whose requests want this processor.
            rows: what is known of each of them.

        Shapes:
            logits: float32 [rows, vocabulary].
        """
        raise NotImplementedError

    def apply_row(self, logits: torch.Tensor, row: Row) -> torch.Tensor | None:
        """The same for one row. Slower in a large batch; if it raises, only that row's request ends.

        Shapes:
            logits: float32 [vocabulary].
        """
        raise NotImplementedError


class Row:
    """A request that samples a token now."""

    __slots__ = ("_batch", "_place", "num_prompt", "num_tokens", "params", "seat", "state")

    def __init__(self, params: SamplingParams, state: Any, seat: int, num_prompt: int) -> None:
        self.params = params
        self.state = state  # what `admit` returned
        self.seat = seat
        self.num_prompt = num_prompt
        self.num_tokens = num_prompt  # the prompt's and those sampled so far; known ahead, so it costs nothing to ask

    def placed(self, batch: Rows, place: int, num_tokens: int) -> None:
        self._batch, self._place, self.num_tokens = batch, place, num_tokens

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def extra_args(self) -> dict[str, Any]:
        return self.params.extra_args or {}

    @property
    def tokens(self) -> torch.Tensor:
        """Prompt and output so far, int64 [num_tokens], on the device."""
        return self._batch.span(self, 0)

    @property
    def prompt_token_ids(self) -> list[int]:
        """On the host: waits for the device."""
        return self._batch.token_ids[self._place][: self.num_prompt]

    @property
    def output_token_ids(self) -> list[int]:
        """On the host: waits for the device."""
        return self._batch.token_ids[self._place][self.num_prompt :]


class Rows(Sequence[Row]):
    """The rows of one call of `apply`. Nothing of it may be kept for the next."""

    def __init__(self, rows: Iterable[Row], num_tokens: Iterable[int], history: History, device: torch.device) -> None:
        self._rows = list(rows)
        self._history = history
        self._device = device
        for place, (row, count) in enumerate(zip(self._rows, num_tokens, strict=True)):
            row.placed(self, place, count)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def last_tokens(self, count: int) -> torch.Tensor:
        """The last tokens of each row, prompt included: int64 [rows, count] on the device, -1 before the beginning."""
        back = torch.arange(count, 0, -1, device=self._device)
        positions = self._lengths.unsqueeze(1) - back
        tokens = self._history.at(self._seats, positions.clamp(min=0)).long()
        return torch.where(positions >= 0, tokens, -1)

    @cached_property
    def token_ids(self) -> list[list[int]]:
        """All tokens of each row, prompt and output, on the host.

        Waits until the device has computed these logits, and lets it wait for what is done with them: steps with such
        rows do not overlap with the next.
        """
        every = self.last_tokens(max(row.num_tokens for row in self._rows)).tolist()
        return [ids[len(ids) - row.num_tokens :] for ids, row in zip(every, self._rows, strict=True)]

    def span(self, row: Row, first: int) -> torch.Tensor:
        """Tokens first, first + 1, … of one row."""
        positions = torch.arange(first, row.num_tokens, device=self._device).unsqueeze(0)
        return self._history.at(torch.full((1,), row.seat, device=self._device), positions)[0].long()

    @cached_property
    def _seats(self) -> torch.Tensor:
        return self._on_device([row.seat for row in self._rows])

    @cached_property
    def _lengths(self) -> torch.Tensor:
        return self._on_device([row.num_tokens for row in self._rows])

    def _on_device(self, values: list[int]) -> torch.Tensor:
        """int64, without a wait."""
        return upload(torch.tensor(values), self._device)
