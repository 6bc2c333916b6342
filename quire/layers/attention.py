"""Self-attention over the paged cache: projections here, the attending in a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from quire.attention.base import ALIKE, AttentionBackend, HeadDims, PerHead, PromptAttention, Scores
from quire.attention.context import GroupContext, LayerCache, StepContext
from quire.distributed.group import Group
from quire.distributed.topology import Topology
from quire.foundation.errors import ConfigError
from quire.kernels.attention.rope import QkvTarget, qk_norm_rope_write
from quire.kernels.elementwise.norm import rms_norm_pair
from quire.layers.cuts import Cut, cut_parameter
from quire.layers.dual_chunk import DualQueries
from quire.layers.head_terms import HeadTerms
from quire.layers.linear import Linear
from quire.layers.norm import HeadNorms, Norm, RMSNorm, norm_across
from quire.quantization.base import scale_exactly


class Keeps(NamedTuple):
    """What a layer keeps of every token, and for how long. Layers that keep the same are one group."""

    kind: str  # see KVGroupSpec
    num_kv_heads: int
    head_dim: int
    window: int = 0  # tokens that a query sees at most, its own included; 0: all
    value_dim: int = 0  # see KVGroupSpec
    made: HeadDims | None = None  # what heads make of a latent row


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Norms of queries and keys. on: "heads" (each by itself), "width" (all of a token's together) or "turned" (each
    head, behind the rotation)."""

    q: nn.Module
    k: nn.Module
    on: Literal["heads", "width", "turned"] = "heads"


class SelfAttention(nn.Module):
    """What every kind of attention over the cache has, and what stacks and decoder layers ask of it.

    index: which of the model's caches is this layer's. The model sets `group`, the number of the layer's group, once it
    knows all of its layers.
    """

    scores = Scores()
    takes_pieces = False  # whether it asks the step for rows before it reads them, whose sums may be under way

    def __init__(self, index: int, keeps: Keeps) -> None:
        super().__init__()
        self.index, self.group, self.keeps = index, 0, keeps

    @property
    def adding(self) -> Linear | None:
        """What adds to the residual stream; None: nobody asks."""
        return None

    def share_with(self, topology: Topology) -> None:
        """Attend to this rank's share of the heads alone. Raises ConfigError if it cannot be shared."""
        raise NotImplementedError

    def forward(self, residual: torch.Tensor, norm: Norm, ctx: StepContext) -> torch.Tensor:
        """`residual += attention(norm(residual))` in place, [tokens, hidden]; returns it.

        Writes what is kept of the tokens to the cache.
        """
        return self.add(residual, norm, residual, ctx)

    def attend(self, x: torch.Tensor, norm: Norm | None, ctx: StepContext) -> torch.Tensor:
        """attention(norm(x)) alone."""
        return self.add(x, norm, None, ctx)

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        """`residual += attention(norm(x))` in place; without a residual, attention(norm(x))."""
        raise NotImplementedError


class Attention(SelfAttention):
    """Grouped-query attention with rotary positions.

    cos_sin: the layer's rotary table. window: tokens that a query
    sees, its own included; None: all. chunk: tokens of a chunk, of which a query sees its own. qk_norm_eps: turns on an
    RMS norm of every query and key head; `qk_norm` is for other norms. scale: of products of queries and keys; None:
    head_dim^-0.5. softcap: c of c · tanh(product / c). sinks: each head has a learned logit that no token has. slopes:
    of each head, see `Scores`. interleaved: the rotation pairs columns 2i and 2i + 1. clip: that queries, keys and
    values are clamped to. qkv: the projection, if it is another than the usual. query_scales: float32 [positions],
    that queries are multiplied by. v_norm: of each head of values. dual: of dual chunk attention, whose table is of
    places in chunks.
    """

    ranks: Group | None = None  # that share it
    takes_pieces = True

    def __init__(
        self,
        index: int,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos_sin: torch.Tensor,
        *,
        window: int | None = None,
        chunk: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        qk_norm: QKNorm | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        interleaved: bool = False,
        clip: float | None = None,
        qkv: Linear | None = None,
        out_transposed: bool = False,
        query_scales: torch.Tensor | None = None,
        sinks: bool = False,
        slopes: Sequence[float] | None = None,
        v_norm: nn.Module | None = None,
        dual: DualQueries | None = None,
    ) -> None:
        if dual is not None and (window or chunk):
            raise ConfigError("config.json: dual_chunk_attention_config does not go with windows", "sliding_window")
        kind, seen = ("chunk", chunk) if chunk else ("window", window) if window else ("full", 0)
        super().__init__(index, Keeps(kind, num_kv_heads, head_dim, seen))
        self.scores = Scores(
            seen, bool(chunk), softcap, sinks, slopes is not None, dual_chunk=0 if dual is None else dual.chunk
        )
        self.sinks = HeadTerms(torch.empty(num_heads)) if sinks else None
        self.slopes = HeadTerms(torch.tensor(slopes), is_stored=False) if slopes is not None else None
        self.heads = (num_heads, num_kv_heads, head_dim)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.clip, self.interleaved = clip, interleaved
        self.cos_sin, self.query_scales, self.dual = cos_sin, query_scales if dual is None else dual.scales, dual
        self.qkv_proj = qkv or Linear.qkv(hidden, num_heads, num_kv_heads, head_dim, bias=qkv_bias)
        self.o_proj = Linear(num_heads * head_dim, hidden, bias=out_bias, role="columns", transposed=out_transposed)
        if qk_norm_eps is not None:
            qk_norm = QKNorm(RMSNorm(head_dim, qk_norm_eps), RMSNorm(head_dim, qk_norm_eps))
        self.v_norm = v_norm
        self.norm_on = qk_norm.on if qk_norm else "heads"
        self.q_norm: nn.Module | None = qk_norm.q if qk_norm else None
        self.k_norm: nn.Module | None = qk_norm.k if qk_norm else None
        # The kernels around the rotation know RMS norms of heads.
        self._norms_inside = self.norm_on != "width" and isinstance(self.q_norm, RMSNorm)
        self._is_plain = clip is None and v_norm is None and (qk_norm is None or self._norms_inside)

    @property
    def adding(self) -> Linear:
        return self.o_proj

    def share_with(self, topology: Topology) -> None:
        heads, kv_heads, head_dim = self.heads
        self.heads = (
            topology.share(heads, "num_attention_heads"), topology.heads(kv_heads, "num_key_value_heads"), head_dim
        )  # fmt: skip
        self._copies = [1, topology.size * self.heads[1] // kv_heads]  # ranks with the same heads
        for norm, count in ((self.q_norm, heads), (self.k_norm, kv_heads)):
            if isinstance(norm, HeadNorms):
                norm.share_with(topology)
            elif norm is not None and self.norm_on == "width":
                if topology.size > 1 and (not isinstance(norm, RMSNorm) or norm.plus_one):
                    raise ConfigError("ranks cannot share norms across heads other than RMS norms")
                cut_parameter(norm, "weight", Cut.of([(count * head_dim, count)], topology))
        for terms in (self.sinks, self.slopes):
            if terms is not None:
                terms.share_with(topology)

    def join(self, group: Group) -> None:
        """See `quire.layers.cuts.Joining`."""
        self.ranks = group

    def keep_scaled(self, k_scale: float, v_scale: float) -> None:
        """Keep keys and values divided by powers of two: what multiplies by them makes up for it, so that nothing but
        what an 8-bit cache holds changes. Once, when the weights are there.

        Raises ConfigError if something stands between the weights and the cache that is not linear in them.
        """
        if list(self.qkv_proj.parts) != ["q_proj", "k_proj", "v_proj"] or self.clip or self.v_norm is not None:
            raise ConfigError(
                "keys and values of this model cannot be scaled: set kv_cache_dtype=auto", "kv_cache_dtype"
            )
        q_rows, k_rows, v_rows = self.qkv_proj.part_rows
        powers = torch.ones(q_rows + k_rows + v_rows, device=self.cos_sin.device)
        powers[q_rows + k_rows :] /= v_scale
        if self.k_norm is None:
            powers[q_rows : q_rows + k_rows] /= k_scale
        elif isinstance(self.k_norm, RMSNorm) and not self.k_norm.plus_one:
            weight = self.k_norm.weight
            scale_exactly(weight.data, torch.full((len(weight),), 1 / k_scale, device=weight.device))
        elif k_scale != 1:
            raise ConfigError(
                "keys behind this model's norm cannot be scaled: set kv_cache_dtype=auto", "kv_cache_dtype"
            )
        self.qkv_proj.scale_rows(powers)
        self.scale *= k_scale
        bias, self.o_proj.bias = self.o_proj.bias, None
        self.o_proj.scale_rows(torch.full((self.o_proj.local_shape[0],), v_scale, device=powers.device))
        self.o_proj.bias = bias

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        """`residual += attention(norm(x))` in place; without a residual, attention(norm(x)).

        Rows whose sums are under way attend a piece at a time: while one's goes out, there are two products and
        attention of the next to do.
        """
        cache, place, group = self._place(ctx)
        if residual is x and ctx.under_way is not None and group.inputs is not None:
            for tokens, rows in ctx.pieces(x):
                q, plan = self._queries(rows, norm, place.of(tokens)), group.plan_of(tokens.start, tokens.stop)
                self._attended(q, ctx.positions[tokens], cache, group.backend, plan, rows)
            return residual
        parts = [self._queries(rows, norm, place.of(tokens)) for tokens, rows in ctx.pieces(x)]
        q = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._attended(q, ctx.positions, cache, group.backend, group.plan, residual)

    def _attended(
        self,
        q: torch.Tensor,
        positions: torch.Tensor,
        cache: LayerCache,
        backend: AttentionBackend | PromptAttention,
        plan: Any,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """What becomes of queries, keys and values being there."""
        if self.query_scales is not None:
            q = q * self.query_scales[positions, None, None].to(q.dtype)
        if self.dual is not None:
            q = self.dual.widened(q, positions)
        y: torch.Tensor = self.o_proj(backend.run(q, cache, plan, self.scale, self._per_head), residual=residual)
        return y

    def _queries(self, x: torch.Tensor, norm: Norm | None, place: QkvTarget) -> torch.Tensor:
        """Rotated; keys and values go to the cache."""
        if self._is_plain and isinstance(norm, RMSNorm) and not norm.plus_one:
            return self.qkv_proj.qkv_rope_write(x, norm, place)
        return qk_norm_rope_write(self._prepare(self.qkv_proj(x, norm)), *place)

    def _place(self, ctx: StepContext) -> tuple[LayerCache, QkvTarget, GroupContext]:
        """Its cache, where queries, keys and values go, and what attends, with its plan."""
        cache, group = ctx.caches[self.index], ctx.groups[self.group]
        assert isinstance(cache, LayerCache)
        q_norm, k_norm = self.q_norm, self.k_norm
        norms: tuple[torch.Tensor | None, torch.Tensor | None, float] = (None, None, 1e-6)
        if self._norms_inside and isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            norms = (q_norm.weight, k_norm.weight, q_norm.eps)
        place = QkvTarget(
            self.cos_sin, ctx.positions, group.slots, cache.k, cache.v, *self.heads, *norms, self.interleaved,
            self.norm_on == "turned",
        )  # fmt: skip
        return cache, place, group

    @property
    def _per_head(self) -> PerHead:
        if self.sinks is None and self.slopes is None:
            return ALIKE
        return PerHead(*(None if terms is None else terms.values for terms in (self.sinks, self.slopes)))

    def _wide_norms(self, qkv: torch.Tensor) -> torch.Tensor:
        """Norms of all of a token's queries together, and of its keys."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.ranks is None and isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            return rms_norm_pair(qkv, (q_norm.weight, k_norm.weight), q_norm.eps)
        heads, kv_heads, head_dim = self.heads
        q, k, v = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
        if self.ranks is None:
            assert q_norm is not None
            assert k_norm is not None
            return torch.cat([q_norm(q), k_norm(k), v], dim=1)
        assert isinstance(q_norm, RMSNorm)
        assert isinstance(k_norm, RMSNorm)
        q, k = norm_across([q_norm, k_norm], [q, k], self._copies, self.ranks.topology, self.ranks)
        return torch.cat([q, k, v], dim=1)

    def _prepare(self, qkv: torch.Tensor) -> torch.Tensor:
        """What stands between the projection and the kernel that rotates."""
        if self.norm_on == "width" and self.q_norm is not None and self.k_norm is not None:
            qkv = self._wide_norms(qkv)
        if self.v_norm is not None:
            _, kv_heads, head_dim = self.heads
            rest, v = qkv.split([qkv.shape[1] - kv_heads * head_dim, kv_heads * head_dim], dim=1)
            qkv = torch.cat([rest, self.v_norm(v.reshape(-1, head_dim)).view(v.shape)], dim=1)
        if self.clip is not None:
            qkv = qkv.clamp_(-self.clip, self.clip)
        if self.norm_on == "width" or self._norms_inside or self.q_norm is None or self.k_norm is None:
            return qkv
        heads, kv_heads, head_dim = self.heads
        tokens = len(qkv)
        q, k, v = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
        q, k = q.reshape(tokens, heads, head_dim), k.reshape(tokens, kv_heads, head_dim)
        q, k = self.q_norm(q), self.k_norm(k)
        return torch.cat([q.view(tokens, -1), k.view(tokens, -1), v], dim=1)
