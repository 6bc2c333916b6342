"""Several residual streams of which a layer sees one and corrects all (AltUp: Baykal et al., 2023), and what Gemma 3n
has beside them: a second way of low rank past attention (LAuReL: Menghani et al., 2024), and feed-forward layers
most of whose gates are shut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quire.attention.context import StepContext
from quire.distributed.group import Group
from quire.layers.activation import activation
from quire.layers.attention import Attention
from quire.layers.borrowed_attention import BorrowedAttention
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm

_LEAST = 1e-5  # of a stream's mean square


@dataclass(frozen=True, slots=True)
class Streams:
    """count: of them. active: the one that layers see. scaled: what a layer adds from a token's own vectors is made of
    the active stream times a learned weight. own: columns of a token's own vector for a layer. rank: of LAuReL."""

    count: int
    active: int
    scaled: bool
    own: int
    rank: int


class AltUp(nn.Module):
    """Streams are [tokens, streams, hidden]."""

    def __init__(self, streams: Streams, hidden: int, eps: float) -> None:
        super().__init__()
        self.streams, self.hidden = streams, hidden
        self.correct_output_scale = nn.Parameter(torch.empty(hidden), requires_grad=False)
        self.correction_coefs = Linear(streams.count, streams.count, bias=False)
        self.prediction_coefs = Linear(streams.count, streams.count**2, bias=False)
        self.modality_router = Linear(hidden, streams.count, bias=False)
        self.router_norm = RMSNorm(hidden, eps)

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.modality_router(self.router_norm(x).mul_(1 / self.hidden))
        return torch.tanh(routed.float()).to(x.dtype)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """What a layer will make of all streams, told by the active one."""
        count = self.streams.count
        mixed = self.prediction_coefs(self._routed(streams[:, self.streams.active].contiguous()))
        return torch.baddbmm(streams, mixed.view(-1, count, count), streams)

    def correct(self, predicted: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """seen [tokens, hidden]: what the layer made of the active one."""
        shares = self.correction_coefs(self._routed(seen)) + 1.0
        return torch.baddbmm(predicted, shares[:, :, None], (seen - predicted[:, self.streams.active])[:, None])


class Laurel(nn.Module):
    def __init__(self, hidden: int, rank: int, eps: float) -> None:
        super().__init__()
        self.linear_left, self.linear_right = Linear(hidden, rank, bias=False), Linear(rank, hidden, bias=False)
        self.post_laurel_norm = RMSNorm(hidden, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))
        return y


class ShutGatedMLP(GatedMLP):
    """shut: the share of gates that a normal distribution of their mean and deviation would have shut; the others are
    what is above that. act: another than SiLU."""

    ranks: Group | None = None  # that share it

    def __init__(self, hidden: int, intermediate: int, act: str, shut: float) -> None:
        super().__init__(hidden, intermediate, act=act)
        self._deviations = torch.special.ndtri(torch.tensor(shut, dtype=torch.float32, device="cpu")).item()

    def join(self, group: Group) -> None:
        """See `quire.layers.cuts.Joining`."""
        self.ranks = group

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        wide = gate.float()
        mean, variance = wide.mean(-1, keepdim=True), wide.var(-1, keepdim=True, unbiased=False)
        if self.ranks is not None:
            mean, variance = of_all_ranks(mean, variance, self.ranks)
        least = mean + variance.sqrt() * self._deviations
        return self._act(nn.functional.relu(wide - least).to(gate.dtype)).mul_(up)


class AltUpLayer(nn.Module):
    """Attention and feed-forward on the active stream between a prediction and its correction; then what is a token's
    own goes to the other streams."""

    def __init__(
        self,
        self_attn: Attention | BorrowedAttention,
        mlp: GatedMLP,
        streams: Streams,
        hidden: int,
        eps: float,
        act: str,
    ) -> None:
        super().__init__()
        self.streams, self._act = streams, activation(act, "hidden_activation")
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.altup, self.laurel = AltUp(streams, hidden, eps), Laurel(hidden, streams.rank, eps)
        self.per_layer_input_gate = Linear(hidden, streams.own, bias=False)
        self.per_layer_projection = Linear(streams.own, hidden, bias=False)
        self.post_per_layer_input_norm = RMSNorm(hidden, eps)

    def forward(self, streams: torch.Tensor, own: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """streams [tokens, streams, hidden], own [tokens, columns] → the streams behind the layer."""
        predicted = self.altup.predict(streams)
        active = predicted[:, self.streams.active].contiguous()
        x = self.input_layernorm(active)
        beside = self.laurel(x)
        attended = active + self.post_attention_layernorm(self.self_attn.attend(x, None, ctx))
        both = (attended + beside) * 0.5**0.5
        fed = self.mlp.add(both, self.pre_feedforward_layernorm, None)
        corrected = self.altup.correct(predicted, both + self.post_feedforward_layernorm(fed))
        first = corrected[:, self.streams.active]
        first = first * self.altup.correct_output_scale if self.streams.scaled else first.contiguous()
        added = self.per_layer_projection(self._act(self.per_layer_input_gate(first)) * own)
        corrected[:, 1:] += self.post_per_layer_input_norm(added)[:, None]
        return corrected


def of_all_ranks(mean: torch.Tensor, variance: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [tokens, 1] each, of as many numbers on every rank → of all of them together: the variance within ranks
    and that of their means (Chan, Golub and LeVeque, 1979), which loses nothing where the mean is large."""
    told = mean.new_zeros(len(mean), 2, group.topology.size)
    told[:, :, group.topology.rank] = torch.cat([mean, variance], dim=1)
    means, variances = group.sum(told).unbind(1)
    return means.mean(1, keepdim=True), (variances.mean(1) + means.var(1, unbiased=False))[:, None]


def of_size(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x [tokens, hidden], as large as `like` in the root of its mean square."""
    wide, model = x.float(), like.float()
    own = wide.square().mean(-1, keepdim=True).clamp_(min=_LEAST).rsqrt_()
    return (wide * (model.square().mean(-1, keepdim=True).sqrt() * own)).to(x.dtype)
