"""Token ids to vectors."""

from __future__ import annotations

import torch
from torch import nn

from quire.distributed.group import Group
from quire.distributed.topology import ALONE, Share, Topology
from quire.kernels.elementwise.norm import rms_norm
from quire.kernels.gemm.linear import linear
from quire.layers.cuts import Cut, cut_parameter
from quire.layers.linear import before
from quire.layers.low_rank import LowRank, LowRankEmbedding
from quire.layers.norm import Norm
from quire.quantization.base import ALL_ROWS


def rounded(scale: float) -> float:
    """As the type of the model's weights has it: those that keep a scale beside them (Gemma) round it so."""
    return float(torch.tensor(scale, dtype=torch.get_default_dtype(), device="cpu"))


class Embedding(nn.Module):
    """Plain in every model, and whole on every rank: a share would save little memory and cost a sum a step. But as a
    head, which is a product, ranks share it by rows of the vocabulary. scale: that vectors are multiplied by."""

    def __init__(self, vocab_size: int, hidden: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.low_rank: LowRankEmbedding | None = None  # what adapters add, if there may be any
        self.head_low_rank: LowRank | None = None  # the same of the head that it is
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden), requires_grad=False)
        self.share_with(ALONE)

    def share_with(self, topology: Topology) -> None:
        """Make logits of this rank's share of the vocabulary alone."""
        self.share: Share = topology.padded(len(self.weight))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids int32 [tokens] → [tokens, hidden]."""
        x = nn.functional.embedding(input_ids, self.weight)
        if self.low_rank is not None and self.low_rank.is_active:
            x = self.low_rank.add(x, input_ids)
        return x if self.scale == 1.0 else x.mul_(self.scale)

    def wide(self, x: torch.Tensor, norm: Norm | None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of a model that ties its head to its embeddings: norm(x [m, hidden]) @ weight.T in float32. Of this
        rank's share, as wide as any rank's; what it lacks to that width counts for nothing."""
        begin, end, room = self.share
        weight = self.weight[begin:end]
        rows, pair = before(x, norm)
        assert isinstance(rows, torch.Tensor)
        head = self.head_low_rank
        if head is not None and head.is_active:
            rows, pair = (rows if pair is None else rms_norm(rows, *pair)), None
        y = linear(rows, weight, norm=pair, out_dtype=torch.float32, out=out if out is None else out[:, : end - begin])
        if head is not None and head.is_active:
            y = head.expand(y, head.shrink(rows), None)
        if end - begin == room:
            return y
        return nn.functional.pad(y, (0, room - (end - begin))) if out is None else out

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """x [m, hidden] @ weight.T in float32, of the whole vocabulary on every rank."""
        return linear(x, self.weight, out_dtype=torch.float32)

    def dense(self, dtype: torch.dtype, rows: slice = ALL_ROWS) -> torch.Tensor:
        return self.weight[rows].to(dtype)


class SpreadEmbedding(Embedding):
    """One too large for every rank to have it: each has the vectors of a share of the tokens, and all add up what they
    find. It takes no adapters and is no head."""

    ranks: Group | None = None

    def share_with(self, topology: Topology) -> None:
        """Keep this rank's share of the vectors."""
        super().share_with(topology)
        cut_parameter(self, "weight", Cut(len(self.weight), (self.share[:2],)))

    def join(self, group: Group) -> None:
        """See `quire.layers.cuts.Joining`."""
        self.ranks = group

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See `Embedding`."""
        if self.ranks is None:
            return super().forward(input_ids)
        begin, end, _ = self.share
        others = (input_ids < begin) | (input_ids >= end)
        x = super().forward((input_ids - begin).masked_fill(others, 0))
        return self.ranks.sum(x.masked_fill(others[:, None], 0))
