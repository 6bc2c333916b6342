"""Activations of feed-forward layers, by the names that config.json has for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from quire.foundation.errors import ConfigError
from quire.kernels.elementwise.activation import relu2

Activation = Callable[[torch.Tensor], torch.Tensor]

_tanh_gelu = partial(nn.functional.gelu, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": nn.functional.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "relu": nn.functional.relu,
    "relu2": relu2,
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


def activation(name: str, key: str = "hidden_act") -> Activation:
    """key: that says so in config.json. Raises ConfigError for a name that is not known."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"config.json: {key} must be one of {', '.join(ACTIVATIONS)}, got {name!r}", key)
    return ACTIVATIONS[name]


class XIELU(nn.Module):
    """x (alpha_p x + beta) above 0, alpha_n (exp(x) - 1 - x) + beta x below (Huang, 2024), with learned alphas;
    what is raised to is at most eps, just below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1), requires_grad=False)
        self.alpha_n = nn.Parameter(torch.empty(1), requires_grad=False)
        self.beta = nn.Parameter(torch.empty(()), requires_grad=False)
        self.eps = nn.Parameter(torch.empty(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        above = nn.functional.softplus(self.alpha_p)
        below = self.beta + nn.functional.softplus(self.alpha_n)
        low = (torch.expm1(torch.minimum(x, self.eps)) - x) * below
        return torch.where(x > 0, above * x * x, low) + self.beta * x
