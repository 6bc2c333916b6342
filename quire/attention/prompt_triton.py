"""Attention within whole prompts through our own Triton kernel: nothing is padded, nothing read back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.base import PLAIN, AttentionSpec
from quire.attention.triton import TritonAttention
from quire.kernels.attention import prompt as prompt_attention


@dataclass(frozen=True, slots=True)
class PromptPlan:
    query_start: torch.Tensor
    num_rows: int
    max_len: int


class TritonPromptAttention:
    name = "triton"

    def __init__(self, spec: AttentionSpec) -> None:
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        if spec.scores != PLAIN:
            return "its scores are products of queries and keys, and all of a prompt counts"
        return TritonAttention.refuses(spec)

    def plan(self, lengths: np.ndarray, query_start: torch.Tensor) -> PromptPlan:
        return PromptPlan(query_start, len(lengths), int(lengths.max()))

    def run(self, qkv: torch.Tensor, plan: PromptPlan, scale: float) -> torch.Tensor:
        out = torch.empty((len(qkv), self._heads[0] * self._heads[2]), dtype=qkv.dtype, device=qkv.device)
        return prompt_attention.attend(qkv, plan.query_start, plan.num_rows, plan.max_len, self._heads, scale, out)
