"""The layer of BERT and its kin: attention both ways, a plain feed-forward, and a norm behind each sum. And the layers
of heads, behind the pooling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from quire.attention.base import ALIKE, Pairs, PerHead, PromptAttention
from quire.attention.context import LayerCache, StepContext
from quire.distributed.topology import Topology
from quire.kernels.gemm.linear import linear
from quire.layers.activation import activation
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm

BUCKETS = 32  # of distances, MPNet's


class EncoderLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, intermediate: int, eps: float, act: str) -> None:
        super().__init__()
        self.heads = (heads, hidden // heads)
        self.scale = (hidden // heads) ** -0.5
        self.act = activation(act)
        parts = dict.fromkeys(("query", "key", "value"), hidden)
        self.qkv = Linear(hidden, 3 * hidden, bias=True, parts=parts, role="rows")
        self.attention_out = Linear(hidden, hidden, bias=True, role="columns")
        self.attention_norm = LayerNorm(hidden, eps)
        self.up = Linear(hidden, intermediate, bias=True, role="rows")
        self.down = Linear(intermediate, hidden, bias=True, role="columns")
        self.norm = LayerNorm(hidden, eps)

    def share_with(self, topology: Topology) -> None:
        """Attend to this rank's share of the heads alone. Raises ConfigError if it cannot be shared."""
        heads, head_dim = self.heads
        self.heads = topology.share(heads, "num_attention_heads"), head_dim

    def forward(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [tokens, hidden] is overwritten."""
        group = ctx.groups[0]
        qkv = self.qkv(x)
        q, k, v = (part.unflatten(1, self.heads) for part in qkv.chunk(3, dim=1))
        cache = LayerCache(k.unsqueeze(2), v.unsqueeze(2))
        backend = cast("PromptAttention", group.backend)
        y = backend.run(q, cache, group.plan, self.scale, self.per_head())
        x = self.attention_norm(self.attention_out(y, residual=x))
        return self.norm(self.down(self.act(self.up(x)), residual=x))  # type: ignore[no-any-return]

    def per_head(self) -> PerHead | Pairs:
        return ALIKE


class DistanceLayer(EncoderLayer):
    """The same where each head adds a number to the scores of tokens so far from each other (T5's way, in MPNet).

    distances: [buckets, heads], of all layers; in a tuple, so that it is no submodule of each. It is whole on every
    rank, which adds the columns of its heads.
    """

    def __init__(
        self, hidden: int, heads: int, intermediate: int, eps: float, act: str, distances: tuple[Embedding]
    ) -> None:
        super().__init__(hidden, heads, intermediate, eps, act)
        self._distances, self._own = distances, slice(0, heads)

    def share_with(self, topology: Topology) -> None:
        share = topology.lines(self.heads[0], self.heads[0], "num_attention_heads")
        self._own = slice(share.begin, share.end)
        super().share_with(topology)

    def per_head(self) -> Pairs:
        return Pairs(self._added)

    def _added(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        places = torch.arange(q.shape[2], device=q.device)
        (table,) = self._distances
        own = table.weight[:, self._own]
        found = own[both_ways_bucket(places - places[:, None])]  # [queries, keys, heads]
        added: torch.Tensor = found.permute(2, 0, 1)[None].to(q.dtype)
        return added


def both_ways_bucket(ahead: torch.Tensor, buckets: int = BUCKETS, far: int = 128) -> torch.Tensor:
    """Of distances, int: half the buckets for either side, of each half those of near tokens one by one, and of others
    by the logarithm, up to `far`."""
    half = buckets // 2
    near = half // 2
    size = ahead.abs()
    log = torch.log(size.clamp(min=1).float() / near) / math.log(far / near) * (half - near)
    bucket = torch.where(size < near, size, (near + log.long()).clamp(max=half - 1))
    return bucket + torch.where(ahead > 0, half, 0)


@dataclass(frozen=True, slots=True)
class Nearness:
    """What layers of DeBERTa know of how far apart tokens are: a row for each of `span` distances to either side, by
    the logarithm if there are `buckets`, up to `far`. shared: rows go through the layer's own projections. by_key,
    by_query: queries look at rows made to keys, keys at rows made to queries. normed: rows are."""

    span: int
    buckets: int
    far: int
    shared: bool
    by_key: bool
    by_query: bool
    normed: bool

    @property
    def terms(self) -> int:
        """Of a score."""
        return 1 + self.by_key + self.by_query

    def places(self, length: int, device: torch.device) -> torch.Tensor:
        """The row for each query and key, int64 [length, length]."""
        place = torch.arange(length, device=device)
        apart = place[:, None] - place
        if self.buckets > 0 and self.far > 0:
            half = self.buckets // 2
            size = torch.where(apart.abs() < half, half - 1, apart.abs())
            most = torch.log(torch.tensor((self.far - 1) / half))  # rounded to float32 as where it was trained
            log = torch.ceil(torch.log(size / half) / most.item() * (half - 1)) + half
            apart = torch.where(size <= half, apart, (log * apart.sign()).long())
        return (apart + self.span).clamp(0, 2 * self.span - 1)


class Distances(nn.Module):
    """The rows of all layers. eps: of a norm that they go through."""

    def __init__(self, rows: int, hidden: int, eps: float | None) -> None:
        super().__init__()
        self.rows = Embedding(rows, hidden)
        self.rows_norm = None if eps is None else LayerNorm(hidden, eps)

    def forward(self) -> torch.Tensor:
        weight: torch.Tensor = self.rows.weight
        return weight if self.rows_norm is None else self.rows_norm(weight)


class DisentangledLayer(EncoderLayer):
    """The same where scores are of contents and of how far apart these are (He et al., DeBERTa, 2020)."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        intermediate: int,
        eps: float,
        act: str,
        near: Nearness,
        distances: tuple[Distances],
    ) -> None:
        super().__init__(hidden, heads, intermediate, eps, act)
        self.near, self._distances = near, distances
        self.scale = (hidden // heads * near.terms) ** -0.5
        # Rows of distances go through them, which are nobody's that an adapter could be asked for.
        of_distances = [self.qkv] if near.shared else []
        if not near.shared:
            self.pos_key = Linear(hidden, hidden, bias=True, role="rows") if near.by_key else None
            self.pos_query = Linear(hidden, hidden, bias=True, role="rows") if near.by_query else None
            of_distances = [one for one in (self.pos_key, self.pos_query) if one is not None]
        for one in of_distances:
            one.takes_adapters = False

    def per_head(self) -> Pairs:
        rows = self._distances[0]()
        if self.near.shared:
            queries, keys, _ = self.qkv(rows).chunk(3, dim=1)
        else:
            queries, keys = (None if one is None else one(rows) for one in (self.pos_query, self.pos_key))
        by_head = [None if one is None else one.unflatten(1, self.heads).transpose(0, 1) for one in (queries, keys)]

        def added(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            places = self.near.places(q.shape[2], q.device).expand(*q.shape[:2], -1, -1)
            total = torch.zeros(places.shape, dtype=q.dtype, device=q.device)
            if self.near.by_key and by_head[1] is not None:
                total += torch.gather(q @ by_head[1].mT, 3, places)
            if self.near.by_query and by_head[0] is not None:
                total += torch.gather(k @ by_head[0].mT, 3, places.mT).mT
            return total.mul_(self.scale)

        return Pairs(added)


class Dense(nn.Module):
    """A layer of a head: few rows, in float32. source: what checkpoints call it."""

    def __init__(self, source: str, in_features: int, out_features: int, *, bias: bool, act: str = "identity") -> None:
        super().__init__()
        self.source = source
        self.act = activation(act.lower())
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=torch.float32), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(linear(x.float(), self.weight, self.bias))


class HeadNorm(LayerNorm):
    """A layer norm between layers of a head, in float32. source: what checkpoints call it."""

    def __init__(self, source: str, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__(size, eps, bias=bias, dtype=torch.float32)
        self.source = source


class WordWeights(nn.Module):
    """The last layer of a masked language model, whose matrix is that of the embeddings; and of its logits, the weights
    of words: ln(1 + x) of those above 0 (SPLADE, Formal et al., 2021), twice if `squashes` says so, but for the last
    time, which is up to whoever sums or compares them. source: what checkpoints call the layer.
    """

    def __init__(self, source: str, embedding: Embedding, *, squashes: int) -> None:
        super().__init__()
        self.source, self.squashes = source, squashes
        self._embedding = [embedding]  # the trunk's: no parameter of this one
        vocab = len(embedding.weight)
        self.bias = nn.Parameter(torch.empty(vocab, dtype=torch.float32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (embedding,) = self._embedding
        weights = nn.functional.relu_(embedding.whole(x.to(embedding.weight.dtype)).add_(self.bias))
        for _ in range(self.squashes - 1):
            weights.log1p_()
        return weights


HeadLayer = Dense | HeadNorm | WordWeights
