"""Latent attention (MLA; DeepSeek-V2, 2024): all heads' keys and values are made of one small row a token, and that row
is what the cache keeps.

It is computed in the absorbed form: queries go through the matrix that would make keys, results through the one that
would make values, and in between the rows themselves are attended to (`kernels/attention/latent.py`). Prompts are in
the expanded form where the backend has it and it takes less: keys and values are made, and attended to. Both matrices
are views of `kv_b_proj`'s plain numbers: it is unpacked while it is loaded, whatever the format of other matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.attention.base import ExpandingBackend, HeadDims
from quire.attention.context import LayerCache, StepContext
from quire.distributed.topology import Topology
from quire.kernels.attention.latent import LatentTarget, by_head, latent_queries, rope_write
from quire.layers.attention import Keeps, SelfAttention
from quire.layers.linear import Linear
from quire.layers.low_rank import RareLowRank
from quire.layers.norm import Norm, RMSNorm
from quire.quantization.base import Rows


class LatentShape(NamedTuple):
    """Of a layer: columns of each head's queries and keys without and with positions, and of its values; ranks of the
    rows that keys and values, and queries, are made of. q_rank None: queries are made of the layer's input."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    q_rank: int | None = None


class LatentAttention(SelfAttention):
    """Ranks share the heads; each has the latent rows whole.

    cos_sin: rotary table of the `rope` columns. scale: of products of queries and keys; None: their columns^-0.5.
    interleaved: the rotation pairs columns 2i and 2i + 1. bias: of the projections to latent rows and the last one.
    query_scales: float32 [positions], that queries are multiplied by.
    """

    takes_pieces = True

    def __init__(
        self,
        index: int,
        hidden: int,
        shape: LatentShape,
        cos_sin: torch.Tensor,
        *,
        eps: float = 1e-6,
        scale: float | None = None,
        bias: bool = False,
        interleaved: bool = True,
        query_scales: torch.Tensor | None = None,
    ) -> None:
        heads, nope, rope, value, rank, q_rank = shape
        super().__init__(index, Keeps("latent", 1, rank + rope, value_dim=rank, made=HeadDims(nope, value)))
        self.shape, self.cos_sin, self.interleaved, self.query_scales = shape, cos_sin, interleaved, query_scales
        self.scale = (nope + rope) ** -0.5 if scale is None else scale
        width, row = heads * (nope + rope), rank + rope
        if q_rank is None and bias:  # of the latent rows alone
            self.q_proj = Linear(hidden, width, bias=False, role="rows", heads=(heads,))
            self.kv_a_proj_with_mqa = Linear(hidden, row, bias=True)
        elif q_rank is None:
            parts = {"q_proj": width, "kv_a_proj_with_mqa": row}
            self.q_kv_a_proj = Linear(hidden, width + row, bias=False, parts=parts, role="rows", heads=(heads, 1))
        else:
            parts = {"q_a_proj": q_rank, "kv_a_proj_with_mqa": row}
            self.qkv_a_proj = Linear(hidden, q_rank + row, bias=bias, parts=parts)
            self.q_a_layernorm = RMSNorm(q_rank, eps)
            self.q_b_proj = Linear(q_rank, width, bias=False, role="rows", heads=(heads,))
        self.kv_a_layernorm = RMSNorm(rank, eps)
        self.kv_b_proj = Linear(rank, heads * (nope + value), bias=False, role="rows", heads=(heads,), is_plain=True)
        self.o_proj = Linear(heads * value, hidden, bias=bias, role="columns")

    def share_with(self, topology: Topology) -> None:
        self.shape = self.shape._replace(heads=topology.share(self.shape.heads, "num_attention_heads"))

    @property
    def adding(self) -> Linear:
        return self.o_proj

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        heads, nope, rope, value, rank, _ = self.shape
        cache, group = ctx.caches[self.index], ctx.groups[self.group]
        assert isinstance(cache, LayerCache)
        parts = [self._project(rows, norm) for _, rows in ctx.pieces(x)]
        q, latent = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        q = q.view(-1, heads, nope + rope)
        if self.query_scales is not None:
            q = q * self.query_scales[ctx.positions, None, None].to(q.dtype)
        weight, adapted = self._expanding(q.dtype)
        keys, values = weight.split([nope, value], dim=1)
        backend, row_norm = group.backend, (self.kv_a_layernorm.weight, self.kv_a_layernorm.eps)
        target = LatentTarget(self.cos_sin, ctx.positions, group.slots, cache.k, self.interleaved)
        absorbed = backend.absorbed(group.plan) if isinstance(backend, ExpandingBackend) else None
        split = len(q) if absorbed is None else absorbed
        y = q.new_empty(len(q), heads, value)
        if split < len(q):  # all rows are written before any is read
            others = q[split:, :, nope:]
            rope_write(others, latent[split:], others, row_norm, *target.of(slice(split, None)))
        if split:
            queries = latent_queries(q[:split], latent[:split], keys, row_norm, target.of(slice(split)))
            for mine, own in adapted:
                other = by_head(q[:split, :, :nope], own[:, :nope])
                queries[..., :rank] = torch.where(mine[:split], other, queries[..., :rank])
            rows = backend.run(queries, cache, group.plan, self.scale).view(-1, heads, rank)
            by_head(rows, values.transpose(1, 2), y[:split])
            for mine, own in adapted:
                y[:split] = torch.where(mine[:split], by_head(rows, own[:, nope:].transpose(1, 2)), y[:split])
        if split < len(q):
            assert isinstance(backend, ExpandingBackend)
            backend.run_expanded(q[split:], cache, weight, group.plan, self.scale, y[split:])
            for mine, own in adapted:
                other = torch.empty_like(y[split:])
                backend.run_expanded(q[split:], cache, own, group.plan, self.scale, other)
                y[split:] = torch.where(mine[split:], other, y[split:])
        return _tensor(self.o_proj(y.flatten(1), residual=residual))

    def _expanding(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """What makes keys and values of latent rows, [heads, nope + value, rank]; and of each adapter that changes it
        the tokens that are its own, bool [tokens, 1, 1], and the same for them. A request's cached rows are read by its
        own tokens alone, so that theirs is the matrix for all of them."""
        shape, low_rank = self.shape, self.kv_b_proj.low_rank
        weight, each = self.kv_b_proj.matrix.dense(dtype), (shape.heads, shape.nope + shape.value, shape.rank)
        if not isinstance(low_rank, RareLowRank) or not low_rank.is_active:
            return weight.view(each), []
        adapted = [(mine[:, None, None], own.view(each)) for mine, own in low_rank.merged(weight)]
        return weight.view(each), adapted

    def _project(self, x: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [tokens, heads * (nope + rope)], and what latent rows are made of, [tokens, rank + rope]."""
        heads, nope, rope, _, rank, q_rank = self.shape
        if q_rank is not None:
            q, latent = _tensor(self.qkv_a_proj(x, norm)).split([q_rank, rank + rope], 1)
            return _tensor(self.q_b_proj(q, self.q_a_layernorm)), latent
        if "q_kv_a_proj" in self._modules:
            q, latent = _tensor(self.q_kv_a_proj(x, norm)).split([heads * (nope + rope), rank + rope], 1)
            return q, latent
        x = x if norm is None else norm(x)
        return _tensor(self.q_proj(x)), _tensor(self.kv_a_proj_with_mqa(x))


def _tensor(rows: Rows) -> torch.Tensor:
    assert isinstance(rows, torch.Tensor)
    return rows
