"""Feed-forward layers."""

from __future__ import annotations

import torch
from torch import nn

from quire.kernels.elementwise.activation import gelu_tanh_and_mul
from quire.layers.activation import Activation, activation
from quire.layers.linear import Linear
from quire.layers.norm import Norm

_SILU = ("silu", "swish")
_TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x)); or with another activation than SiLU.

    bias: of all, or of (gate and up, down). fused: what checkpoints call gate and up if they have them as one, up
    before gate if `up_first`. gate_scale: that the gate is multiplied by.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        bias: bool | tuple[bool, bool] = False,
        act: str = "silu",
        fused: str = "",
        up_first: bool = False,
        gate_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.act = None if act in _SILU and gate_scale == 1.0 else act
        self.gate_scale = gate_scale
        inner, outer = bias if isinstance(bias, tuple) else (bias, bias)
        self.gate_up_proj = Linear.gate_up(
            hidden, intermediate, bias=inner, fused=fused, silu=self.act is None, up_first=up_first
        )
        self.down_proj = Linear(intermediate, hidden, bias=outer, role="columns")
        self._act = activation(act)

    @property
    def adding(self) -> Linear:
        """What adds to the residual stream."""
        return self.down_proj

    def forward(self, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """`residual += mlp(norm(residual))` in place, [tokens, hidden]; returns it."""
        return self.add(residual, norm, residual)

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None) -> torch.Tensor:
        """`residual += mlp(norm(x))` in place; without a residual, mlp(norm(x))."""
        if self.act is None:
            inner = self.gate_up_proj(x, norm, reader=self.down_proj)
        else:
            inner = self._gated(self.gate_up_proj(x, norm))
        y: torch.Tensor = self.down_proj(inner, residual=residual)
        return y

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.act in _TANH_GELU and self.gate_scale == 1.0:
            return gelu_tanh_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        if self.gate_scale != 1.0:
            gate = gate * self.gate_scale
        return self._act(gate).mul_(up)


class MLP(nn.Module):
    """down(act(up(x))). act: by name, or a module of its own weights. transposed: as checkpoints have the matrices."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        act: str | nn.Module,
        *,
        bias: bool = True,
        transposed: bool = False,
        key: str = "hidden_act",
    ) -> None:
        super().__init__()
        self.up_proj = Linear(hidden, intermediate, bias=bias, role="rows", transposed=transposed)
        self.down_proj = Linear(intermediate, hidden, bias=bias, role="columns", transposed=transposed)
        self.act_fn: Activation = activation(act, key) if isinstance(act, str) else act

    @property
    def adding(self) -> Linear:
        """What adds to the residual stream."""
        return self.down_proj

    def forward(self, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """`residual += mlp(norm(residual))` in place, [tokens, hidden]; returns it."""
        return self.add(residual, norm, residual)

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None) -> torch.Tensor:
        """`residual += mlp(norm(x))` in place; without a residual, mlp(norm(x))."""
        y: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(x, norm)), residual=residual)
        return y
