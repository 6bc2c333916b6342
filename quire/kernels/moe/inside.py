"""What an expert does besides its two products: the gate between them, and biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.kernels.elementwise.activation import silu_and_mul


@dataclass(frozen=True, slots=True)
class Gate:
    """gate · sigmoid(alpha · gate) · (up + shift): SiLU, unless another alpha is told.

    limit: that gate is clamped to from above, and up both ways, before; 0: neither is. squared: there is no gate, but
    relu(up)² alone; matrices of gate and up have the lines of up.
    """

    alpha: float = 1.0
    limit: float = 0.0
    shift: float = 0.0
    squared: bool = False


class Inside(NamedTuple):
    """gate_up_bias [experts, 2 · inner], down_bias [experts, hidden], of the type of activations; None: no bias."""

    gate: Gate = Gate()
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


USUAL = Inside()


class Shared(NamedTuple):
    """Experts that every token goes through, as one with a gate of SiLU, whose inner size is a multiple of the others'.

    Shapes:
        gate_up [2 · inner, hidden], down [hidden, inner], of the experts' type; scales float32 [2 · inner] and
        [hidden], if these are of 8 bits; gate [1, hidden]: what it makes of x is multiplied by sigmoid(gate · x).
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    gate: torch.Tensor | None = None


def gated(gate_up: torch.Tensor, how: Gate) -> torch.Tensor:
    """gate_up [tokens, 2 · inner], gate first, or `squared` [tokens, inner] → [tokens, inner], float32 inside."""
    if how.squared:
        return torch.relu(gate_up.float()).square_().to(gate_up.dtype)
    if how == Gate():
        return silu_and_mul(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    if how.limit:
        gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
    return (gate * torch.sigmoid(how.alpha * gate) * (up + how.shift)).to(gate_up.dtype)
