"""Attention that reads shared prefixes by the arrays of `SharedPrefix`, written out in plain torch.

Rows that share a prefix see its tokens through their tile's leader alone, and the rest through their own table. So one
wrong number in the arrays is a wrong answer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.attention.base import (
    ALIKE,
    AttentionInputs,
    AttentionSpec,
    LayerCache,
    PerHead,
    SharedPrefix,
    prefix_tile_rows,
)
from quire.attention.torch_cpu import CPUPlan, TorchCPUAttention


class ReferencePlan(NamedTuple):
    inputs: AttentionInputs
    plain: CPUPlan


class PrefixReference(TorchCPUAttention):
    name = "prefix_reference"
    prefix_support = True
    num_shared_rows = 0  # decode rows that were answered with a prefix read for them, over all steps and instances
    num_tiles = 0

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._tile_rows = prefix_tile_rows(spec.num_heads // spec.num_kv_heads)

    def plan(self, inputs: AttentionInputs) -> ReferencePlan:  # type: ignore[override]
        if inputs.prefix is not None:
            self._check(inputs, inputs.prefix)
        return ReferencePlan(inputs, super().plan(inputs))

    def _check(self, inputs: AttentionInputs, prefix: SharedPrefix) -> None:
        """Every row with a prefix is in one tile, and in no other; tiles hold no more than they can."""
        seen = set()
        used = [tile for tile in prefix.tiles.tolist() if tile[2]]
        assert used, "the arrays are there for nothing"
        for leader, first, count, tokens in used:
            members = prefix.members[first : first + count].tolist()
            assert len(members) == count <= self._tile_rows
            assert leader in inputs.seats[members].tolist()
            assert 0 < tokens < min(inputs.seq_lens[members].tolist())
            assert prefix.tokens_of_row[members].eq(tokens).all()
            assert not seen & set(members)
            seen.update(members)
        assert seen == set(prefix.tokens_of_row.nonzero().flatten().tolist())
        assert max(seen) < inputs.num_decodes == len(prefix.tokens_of_row) == len(prefix.members)
        PrefixReference.num_shared_rows += len(seen)
        PrefixReference.num_tiles += len(used)

    def run(
        self, q: torch.Tensor, cache: LayerCache, plan: ReferencePlan, scale: float, heads: PerHead = ALIKE
    ) -> torch.Tensor:  # type: ignore[override]
        assert heads == ALIKE, "what sinks and slopes do to prefixes is not in this reference"
        out = super().run(q, cache, plan.plain, scale)
        if plan.inputs.prefix is not None:
            attend_by_prefix(q, cache, plan.inputs, plan.inputs.prefix, scale, out)
        return out


def attend_by_prefix(
    q: torch.Tensor, cache: LayerCache, inputs: AttentionInputs, prefix: SharedPrefix, scale: float, out: torch.Tensor
) -> None:
    """Answer the rows that share a prefix anew: out [tokens, heads * head_dim]."""
    for leader, first, count, tokens in prefix.tiles.tolist():
        for row in prefix.members[first : first + count].tolist():
            assert prefix.tokens_of_row[row] == tokens
            shared = _attend(q[row], cache, inputs.block_table[leader], 0, tokens, scale)
            own_table, end = inputs.block_table[inputs.seats[row]], int(inputs.seq_lens[row])
            own = _attend(q[row], cache, own_table, tokens, end, scale)
            out[row] = _merge(shared, own).flatten()


def _attend(
    q: torch.Tensor, cache: LayerCache, table: torch.Tensor, start: int, end: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [heads, head_dim] over tokens [start, end) of one table: the result, and the log of the sum of exponentials
    [heads, 1]. float64."""
    kv_heads, block_size = cache.k.shape[1:3]
    token = torch.arange(start, end)
    k, v = (x[table[token // block_size].long(), :, token % block_size].double() for x in (cache.k, cache.v))
    k, v = (x.repeat_interleave(len(q) // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("hd,thd->ht", q.double(), k) * scale
    return torch.einsum("ht,thd->hd", scores.softmax(-1), v), scores.logsumexp(-1, keepdim=True)


def _merge(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    share = torch.sigmoid(a[1] - b[1])
    return a[0] * share + b[0] * (1 - share)
