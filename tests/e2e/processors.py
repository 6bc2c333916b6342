"""Logits processors as users write them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

from quire import LogitsProcessor, SamplingParams
from quire.worker.sampling.plugins import ProcessorSetup, Row, Rows


class NoRepeatOnDevice(LogitsProcessor):
    """No two tokens twice in this order: from the history on the device, without a wait."""

    def admit(self, params: SamplingParams) -> Any:
        return (params.extra_args or {}).get("no_repeat") == "device" or None

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        last = rows.last_tokens(1)
        for place, row in enumerate(rows):
            tokens = row.tokens
            followers = torch.where(tokens[:-1] == last[place], tokens[1:], self.setup.vocab_size)
            banned = torch.zeros(self.setup.vocab_size + 1, dtype=torch.bool, device=logits.device)
            logits[place].masked_fill_(banned.index_fill_(0, followers, True)[:-1], -math.inf)


class NoRepeatOnHost(LogitsProcessor):
    """The same in plain Python, for one row at a time; returns its edit."""

    def admit(self, params: SamplingParams) -> Any:
        return (params.extra_args or {}).get("no_repeat") == "host" or None

    def apply_row(self, logits: torch.Tensor, row: Row) -> torch.Tensor:
        tokens = row.prompt_token_ids + row.output_token_ids
        edited = logits.clone()
        edited[[then for one, then in pairwise(tokens) if one == tokens[-1]]] = -math.inf
        return edited


class Force(LogitsProcessor):
    """The tokens of `force`, one after the other, then free; errors wherever they are asked for."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        forced = (params.extra_args or {}).get("force", [])
        if not isinstance(forced, list) or not all(isinstance(token, int) for token in forced):
            raise ValueError(f"force must be a list of token ids, got {forced!r}")

    def admit(self, params: SamplingParams) -> Any:
        arguments = params.extra_args or {}
        if arguments.get("fail_at") == "admit":
            raise ZeroDivisionError("at the door")
        return arguments if "force" in arguments or "fail_at" in arguments else None

    def apply_row(self, logits: torch.Tensor, row: Row) -> None:
        if row.num_output == row.state.get("fail_at"):
            raise ZeroDivisionError(f"at token {row.num_output}")
        forced = row.state.get("force", [])
        if row.num_output < len(forced):
            logits[forced[row.num_output]] = 1e4


class FailTogether(LogitsProcessor):
    """Works on all its rows at once, and cannot."""

    def admit(self, params: SamplingParams) -> Any:
        return (params.extra_args or {}).get("fail_together")

    def apply(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        return logits[:, : len(rows)]  # of another shape


class Harmless(LogitsProcessor):
    """Never changes the likeliest token, and would notice greedy rows."""

    def is_argmax_invariant(self) -> bool:
        return True

    def admit(self, params: SamplingParams) -> Any:
        assert not params.is_greedy
        return (params.extra_args or {}).get("harmless")

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        for place, row in enumerate(rows):
            best = logits[place].argmax()
            logits[place] = torch.full_like(logits[place], -math.inf).index_fill_(0, best, float(row.num_output))


class Neither(LogitsProcessor):
    def admit(self, params: SamplingParams) -> Any:  # noqa: ARG002
        return True


class CannotBeMade(Neither):
    def __init__(self, setup: ProcessorSetup) -> None:
        raise FileNotFoundError(setup.model_path / "words.txt")

    def apply_row(self, logits: torch.Tensor, row: Row) -> None: ...


HERE = "tests.e2e.processors"
ALL = [f"{HERE}:{name}" for name in ("NoRepeatOnDevice", "NoRepeatOnHost", "Force", "FailTogether", "Harmless")]
