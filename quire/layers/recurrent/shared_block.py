"""One attention and feed-forward block that several layers share, each with adapters of its own, before their Mamba-2
(Zamba 2): it sees what comes in beside the embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quire.attention.context import LayerCache, StepContext
from quire.distributed.topology import Topology
from quire.kernels.attention.rope import QkvTarget, qk_norm_rope_write
from quire.layers.activation import Activation
from quire.layers.attention import Keeps, SelfAttention
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.mamba2 import Mamba2


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSizes:
    """rank: of adapters. adapts_attention: there are such of queries, keys and values too."""

    hidden: int
    heads: int
    head_dim: int
    intermediate: int
    rank: int
    adapts_attention: bool
    bias: bool
    eps: float


class _Projections(nn.Module):
    """users: numbers of those who share it, of all who share any."""

    def __init__(self, sizes: SharedSizes, users: list[int]) -> None:
        super().__init__()
        width, twice = sizes.heads * sizes.head_dim, 2 * sizes.hidden
        self.qkv_proj = Linear.qkv(twice, sizes.heads, sizes.heads, sizes.head_dim, bias=False)
        self.o_proj = Linear(width, sizes.hidden, bias=False, role="columns")
        for user in users if sizes.adapts_attention else ():
            parts = {f"linear_{part}_adapter_list.{user}.0": sizes.rank for part in "qkv"}
            self.add_module(f"narrow_{user}", Linear(twice, 3 * sizes.rank, bias=False, parts=parts))
            for part in "qkv":
                parts = {f"linear_{part}_adapter_list.{user}.1": width}
                up = Linear(sizes.rank, width, bias=False, parts=parts, role="rows", heads=(sizes.heads,))
                self.add_module(f"wide_{part}_{user}", up)

    def qkv(self, x: torch.Tensor, user: int) -> torch.Tensor:
        y: torch.Tensor = self.qkv_proj(x)
        if hasattr(self, f"narrow_{user}"):
            narrow = getattr(self, f"narrow_{user}")(x).chunk(3, dim=1)
            wide = (getattr(self, f"wide_{part}_{user}")(n.contiguous()) for part, n in zip("qkv", narrow, strict=True))
            y = y + torch.cat(list(wide), dim=1)
        return y


class _FeedForward(nn.Module):
    def __init__(self, sizes: SharedSizes, users: list[int], act: Activation) -> None:
        super().__init__()
        self._act = act
        inner = sizes.intermediate
        self.gate_up_proj = Linear.gate_up(sizes.hidden, inner, bias=sizes.bias, fused="gate_up_proj", silu=False)
        self.down_proj = Linear(inner, sizes.hidden, bias=sizes.bias, role="columns")
        for user in users:
            name = f"gate_up_proj_adapter_list.{user}"
            self.add_module(
                f"narrow_{user}", Linear(sizes.hidden, sizes.rank, bias=False, parts={f"{name}.0": sizes.rank})
            )
            self.add_module(
                f"wide_{user}", Linear.gate_up(sizes.rank, inner, bias=False, fused=f"{name}.1", silu=False)
            )

    def forward(self, x: torch.Tensor, norm: RMSNorm, user: int) -> torch.Tensor:
        x = norm(x)
        narrow, wide = getattr(self, f"narrow_{user}"), getattr(self, f"wide_{user}")
        gate, up = wide(narrow(x), residual=self.gate_up_proj(x)).chunk(2, dim=1)
        y: torch.Tensor = self.down_proj(self._act(gate) * up)
        return y


class SharedBlock(nn.Module):
    def __init__(self, sizes: SharedSizes, users: list[int], act: Activation) -> None:
        super().__init__()
        self.sizes = sizes
        self.input_layernorm = RMSNorm(2 * sizes.hidden, sizes.eps)
        self.self_attn = _Projections(sizes, users)
        self.pre_ff_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.feed_forward = _FeedForward(sizes, users, act)


class _OwnCache(SelfAttention):
    """What one of those who share the block keeps."""

    def __init__(self, index: int, sizes: SharedSizes, cos_sin: torch.Tensor) -> None:
        super().__init__(index, Keeps("full", sizes.heads, sizes.head_dim))
        self.heads, self.cos_sin = (sizes.heads, sizes.heads, sizes.head_dim), cos_sin
        self.scale = (sizes.head_dim / 2) ** -0.5

    def share_with(self, topology: Topology) -> None:
        heads = topology.share(self.heads[0], "num_attention_heads")
        self.heads = (heads, heads, self.heads[2])

    def run(self, qkv: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        cache, group = ctx.caches[self.index], ctx.groups[self.group]
        assert isinstance(cache, LayerCache)
        place = QkvTarget(
            self.cos_sin, ctx.positions, group.slots, cache.k, cache.v, *self.heads, None, None, 1e-6, False
        )
        return group.backend.run(qk_norm_rope_write(qkv, *place), cache, group.plan, self.scale)


class MambaLayer(nn.Module):
    """Norm and Mamba-2."""

    def __init__(self, mamba: Mamba2, hidden: int, eps: float) -> None:
        super().__init__()
        self.mamba, self.input_layernorm = mamba, RMSNorm(hidden, eps)

    def forward(self, residual: torch.Tensor, embedded: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # noqa: ARG002
        """residual [tokens, hidden]: updated in place and returned."""
        return self.mamba(residual, self.input_layernorm, ctx)  # type: ignore[no-any-return]


class SharingLayer(nn.Module):
    """The shared block, a projection, and Mamba-2 of what came in and that. user: its number among those who share any.
    owns: the block's tensors are stored with this layer."""

    def __init__(
        self, index: int, user: int, block: SharedBlock, mamba: MambaLayer, cos_sin: torch.Tensor, *, owns: bool
    ) -> None:
        super().__init__()
        sizes = block.sizes
        self._user, self._block = user, (block,)  # in a tuple, so that it is a submodule of one layer alone
        if owns:
            self.shared_transformer = block
        self.kept = _OwnCache(index, sizes, cos_sin)
        self.linear = Linear(sizes.hidden, sizes.hidden, bias=False)
        self.mamba_decoder = mamba

    def forward(self, residual: torch.Tensor, embedded: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """residual [tokens, hidden]: updated in place and returned."""
        block, user = self._block[0], self._user
        x = block.input_layernorm(torch.cat([residual, embedded], dim=1))
        attended = self.kept.run(block.self_attn.qkv(x, user), ctx)
        fed = block.feed_forward(block.self_attn.o_proj(attended), block.pre_ff_layernorm, user)
        both = self.linear(fed).add_(residual)
        return self.mamba_decoder.mamba.add(both, self.mamba_decoder.input_layernorm, residual, ctx)
