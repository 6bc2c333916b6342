"""The layer of BERT and its kin: attention both ways, a plain feed-forward, and a norm behind each sum. And the layers
of heads, behind the pooling."""

from __future__ import annotations

import torch
from torch import nn

from quire.attention.context import LayerCache, StepContext
from quire.kernels.gemm.linear import linear
from quire.layers.activation import activation
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm


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

    def forward(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [tokens, hidden] is overwritten."""
        group = ctx.groups[0]
        qkv = self.qkv(x)
        q, k, v = (part.unflatten(1, self.heads) for part in qkv.chunk(3, dim=1))
        y = group.backend.run(q, LayerCache(k.unsqueeze(2), v.unsqueeze(2)), group.plan, self.scale)
        x = self.attention_norm(self.attention_out(y, residual=x))
        return self.norm(self.down(self.act(self.up(x)), residual=x))  # type: ignore[no-any-return]


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
        weights = nn.functional.relu_(embedding.wide(x.to(embedding.weight.dtype), None).add_(self.bias))
        for _ in range(self.squashes - 1):
            weights.log1p_()
        return weights


HeadLayer = Dense | HeadNorm | WordWeights
