"""Attention within whole prompts through our own Triton kernel: nothing is padded, nothing read back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.base import ALIKE, AttentionSpec, LayerCache, Pairs, PerHead
from quire.attention.prompt_torch import unlike_products
from quire.attention.triton import TritonAttention
from quire.kernels.attention import prompt as prompt_attention
from quire.platforms.transfers import upload


@dataclass(frozen=True, slots=True)
class PromptPlan:
    query_start: torch.Tensor
    num_rows: int
    max_len: int
    num_keys: torch.Tensor | None  # int32 [rows]; None: all of a row's tokens


class TritonPromptAttention:
    name = "triton"

    def __init__(self, spec: AttentionSpec) -> None:
        self._window, self._device = spec.scores.window, spec.device

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        return unlike_products(spec.scores) or TritonAttention.refuses(spec)

    def plan(self, lengths: np.ndarray, query_start: torch.Tensor, num_keys: np.ndarray | None = None) -> PromptPlan:
        keys = None if num_keys is None else upload(torch.from_numpy(num_keys.astype(np.int32)), self._device)
        return PromptPlan(query_start, len(lengths), int(lengths.max()), keys)

    def run(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        plan: PromptPlan,
        scale: float,
        heads: PerHead | Pairs = ALIKE,  # noqa: ARG002 (nothing, of such scores)
    ) -> torch.Tensor:
        out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        k, v = cache.k.squeeze(2), cache.v.squeeze(2)
        rows = (plan.query_start, plan.num_rows, plan.max_len)
        return prompt_attention.attend(q, k, v, *rows, scale, out, window=self._window, num_keys=plan.num_keys)
