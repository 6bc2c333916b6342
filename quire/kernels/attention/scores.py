"""What attention's scores, products of queries and keys times a scale, get besides, and which of them count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Scores:
    """Of all layers that one backend serves; in this order.

    softcap: c: scores become c · tanh(score / c); 0: they stay. slopes: each head adds its slope times how far behind
    the query a token lies, a number below 0 (ALiBi, Press et al., 2021). window: tokens that a query sees, its own
    included; 0: all. chunked: the window does not move with the query: tokens stand in chunks of so many, and a query
    sees its own chunk. sinks: a logit a head takes part in the softmax that no token has (Xiao et al., 2023; gpt-oss).
    pairs: each layer adds something to every score, see `Pairs`; for attention within whole prompts. dual_chunk:
    queries come three times, side by side: for tokens of their own chunk of so many, of the one before, and of
    all others.
    """

    window: int = 0
    chunked: bool = False
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    pairs: bool = False
    dual_chunk: int = 0

    @property
    def are_plain(self) -> bool:
        """Whether they are products and nothing else, whichever of them count."""
        return not (self.softcap or self.sinks or self.slopes or self.pairs or self.dual_chunk)

    def first_seen(self, position: int) -> int:
        """The first token that the query at `position` sees."""
        if not self.window:
            return 0
        return position // self.window * self.window if self.chunked else max(0, position + 1 - self.window)

    def visible(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Whether queries at `position` see tokens; both int, of shapes that go together."""
        seen = token <= position
        return seen & (token >= self.begins(position)) if self.window else seen

    def behind(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor | None:
        """What scores depend on besides queries and keys, numbers up to 0: how far behind a query at `position` a token
        lies, with dual chunks by how many chunks. None: nothing."""
        if self.dual_chunk:
            token, position = (x.div(self.dual_chunk, rounding_mode="floor") for x in (token, position))
        return token - position if self.slopes or self.dual_chunk else None

    def begins(self, position: torch.Tensor) -> torch.Tensor:
        """`first_seen` of many."""
        if not self.window:
            return torch.zeros_like(position)
        if self.chunked:
            return position.div(self.window, rounding_mode="floor") * self.window
        return (position + 1 - self.window).clamp(min=0)


class PerHead(NamedTuple):
    """What a layer's heads bring of their own, float32 [heads] each; None: nothing."""

    sinks: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """added: from queries and keys of prompts of a length, [rows, heads, length, head_dim], what is added to their
    scores, [rows or 1, heads, length, length] of the same type."""

    added: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


PLAIN = Scores()
ALIKE = PerHead()
