"""Attention by FlashAttention 2, where it is installed.

It wants pages as [page, token, head, dimension] of 256 tokens or a multiple. Its strides are free but for the last one,
so ours, turned, will do; their size is `block_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.attention.base import ALIKE, AttentionInputs, AttentionSpec, LayerCache, PerHead
from quire.attention.library import missing, refuses_as_all_do

HEAD_DIMS = (32, 64, 80, 96, 128, 160, 192, 256)
PAGE = 256  # tokens


@dataclass(frozen=True, slots=True)
class Prompts:
    """Rows of many queries, for the library's ragged call. Tensors are int32, on the device."""

    end: int  # of the tokens that are somebody's
    query_start: torch.Tensor  # [rows + 1]
    key_start: torch.Tensor  # [rows + 1]
    pages: torch.Tensor  # [rows, blocks]
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class FlashPlan:
    num_decodes: int
    lengths: torch.Tensor  # int32 [decodes]
    pages: torch.Tensor  # int32 [decodes, blocks]
    prompts: Prompts | None


class FlashAttention:
    name = "flash_attn"
    reads_host = True
    graph_support = False  # not tried
    prefix_support = False
    prompt_wave = 0

    def __init__(self, spec: AttentionSpec) -> None:
        import flash_attn

        self._decode: Any = flash_attn.flash_attn_with_kvcache
        self._prefill: Any = flash_attn.flash_attn_varlen_func
        self._window = (spec.scores.window - 1, 0) if spec.scores.window else (-1, -1)

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        if (reason := missing("flash_attn", (2, 5))) is not None:
            return reason
        if spec.block_size % PAGE:
            return f"its pages have a multiple of {PAGE} tokens: set block_size to {PAGE}, not {spec.block_size}"
        return refuses_as_all_do(spec, HEAD_DIMS)

    def plan(self, inputs: AttentionInputs) -> FlashPlan:
        split = inputs.num_decodes
        pages = inputs.block_table[inputs.seats.long()]
        prompts = None
        if split < inputs.num_rows:
            ends = inputs.seq_lens[split : inputs.num_rows].cumsum(0, dtype=torch.int32)
            assert inputs.query_start_host is not None
            prompts = Prompts(
                end=inputs.query_start_host[-1],
                query_start=inputs.query_start[split:] - split,
                key_start=torch.nn.functional.pad(ends, (1, 0)),
                pages=pages[split:],
                max_query_len=inputs.max_query_len,
                max_seq_len=inputs.max_seq_len,
            )
        return FlashPlan(split, inputs.seq_lens[:split], pages[:split], prompts)

    def run(
        self, q: torch.Tensor, cache: LayerCache, plan: FlashPlan, scale: float, heads: PerHead = ALIKE
    ) -> torch.Tensor:
        assert heads == ALIKE, "refused"
        out, split = torch.zeros_like(q), plan.num_decodes  # what belongs to nobody stays finite
        k, v = cache.k.transpose(1, 2), cache.v.transpose(1, 2)
        how = {"softmax_scale": scale, "causal": True, "window_size": self._window}
        if split:
            out[:split] = self._decode(
                q[:split].unsqueeze(1), k, v, cache_seqlens=plan.lengths, block_table=plan.pages, **how
            ).squeeze(1)
        if (prompts := plan.prompts) is not None:
            out[split : prompts.end] = self._prefill(
                q[split : prompts.end], k, v, prompts.query_start, prompts.key_start, prompts.max_query_len,
                prompts.max_seq_len, block_table=prompts.pages, **how,
            )  # fmt: skip
        return out.flatten(1)
