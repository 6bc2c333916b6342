"""Attention within whole prompts by torch's fused kernels, on any device: rows of like length together, padded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from quire.attention.base import PLAIN, AttentionSpec
from quire.attention.grouping import alike

# Rows are attended together if the longest has at most this many times the shortest's tokens, and a bit.
MAX_PADDING, PADDING_TOKENS = 1.125, 4
GROUP_TOKENS, CPU_TOKENS = 32768, 2048  # of one group, padding included: on a CPU it shall stay in the cache


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of like length as [rows, length], the shorter ones padded at the end with tokens of their own."""

    rows: int
    length: int
    gather: torch.Tensor | slice  # [rows * length]: the token at each place
    real: torch.Tensor | None  # places that are no padding; None: all
    tokens: torch.Tensor | slice  # theirs
    mask: torch.Tensor | None  # additive [rows, 1, 1, length]; None: nothing is padded


class TorchPromptAttention:
    name = "sdpa"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        plain = spec.scores == PLAIN
        return None if plain else "its scores are products of queries and keys, and all of a prompt counts"

    def plan(self, lengths: np.ndarray, query_start: torch.Tensor) -> list[Group]:  # noqa: ARG002 (lengths say it)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        most = CPU_TOKENS if self._spec.device.type == "cpu" else GROUP_TOKENS
        return [
            self._group(rows, starts, lengths)
            for rows in alike(lengths.tolist(), padding=MAX_PADDING, extra=PADDING_TOKENS, most=most)
        ]

    def run(self, qkv: torch.Tensor, plan: list[Group], scale: float) -> torch.Tensor:
        spec = self._spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        out = torch.empty(len(qkv), spec.num_heads * spec.head_dim, dtype=qkv.dtype, device=qkv.device)
        for group in plan:
            piece = qkv[group.gather].view(group.rows, group.length, sum(heads), spec.head_dim)
            q, k, v = (x.transpose(1, 2) for x in piece.split(heads, dim=2))
            y = scaled_dot_product_attention(
                q, k, v, attn_mask=group.mask, scale=scale, enable_gqa=spec.num_heads != spec.num_kv_heads
            )
            flat = y.transpose(1, 2).reshape(group.rows * group.length, -1)
            out[group.tokens] = flat if group.real is None else flat[group.real]
        return out

    def _group(self, rows: list[int], starts: np.ndarray, lengths: np.ndarray) -> Group:
        counts = lengths[rows]
        length = int(counts.max())
        if counts.min() == length and rows[-1] - rows[0] == len(rows) - 1:
            tokens = slice(int(starts[rows[0]]), int(starts[rows[-1] + 1]))
            return Group(len(rows), length, tokens, None, tokens, None)
        places = np.arange(length)
        within = places < counts[:, None]
        gather = self._upload((starts[rows][:, None] + np.where(within, places, 0)).ravel())
        if within.all():
            return Group(len(rows), length, gather, None, gather, None)
        real = self._upload(np.flatnonzero(within))
        mask = torch.zeros(len(rows), 1, 1, length, dtype=self._spec.dtype)
        mask[torch.from_numpy(~within)[:, None, None]] = float("-inf")
        return Group(len(rows), length, gather, real, gather[real], mask.to(self._spec.device))

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._spec.device)
