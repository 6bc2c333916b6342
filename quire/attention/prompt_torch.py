"""Attention within whole prompts by torch's fused kernels, on any device: rows of like length together, padded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from quire.attention.base import ALIKE, AttentionSpec, LayerCache, Pairs, PerHead, Scores
from quire.attention.grouping import alike

# Rows are attended together if the longest has at most this many times the shortest's tokens, and a bit.
MAX_PADDING, PADDING_TOKENS = 1.125, 4
GROUP_TOKENS, CPU_TOKENS = 32768, 2048  # of one group, padding included: on a CPU it shall stay in the cache


def unlike_products(scores: Scores) -> str | None:
    """Why scores are not for attention within whole prompts."""
    if scores.are_plain and not scores.chunked:
        return None
    return "its scores are products of queries and keys alone, and a window moves with the query"


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of like length as [rows, length], the shorter ones padded at the end with tokens of their own."""

    rows: int
    length: int
    gather: torch.Tensor | slice  # [rows * length]: the token at each place
    real: torch.Tensor | None  # places that are no padding; None: all
    tokens: torch.Tensor | slice  # theirs
    mask: torch.Tensor | None  # additive [rows, 1, 1 or length, length]; None: everything is seen


class TorchPromptAttention:
    name = "sdpa"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        return unlike_products(replace(spec.scores, pairs=False))

    def plan(
        self,
        lengths: np.ndarray,
        query_start: torch.Tensor,  # noqa: ARG002 (lengths say it)
        num_keys: np.ndarray | None = None,
    ) -> list[Group]:
        starts = np.concatenate([[0], np.cumsum(lengths)])
        most = CPU_TOKENS if self._spec.device.type == "cpu" else GROUP_TOKENS
        return [
            self._group(rows, starts, lengths, lengths if num_keys is None else num_keys)
            for rows in alike(lengths.tolist(), padding=MAX_PADDING, extra=PADDING_TOKENS, most=most)
        ]

    def run(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        plan: list[Group],
        scale: float,
        heads: PerHead | Pairs = ALIKE,
    ) -> torch.Tensor:
        spec = self._spec
        out = torch.empty(len(q), spec.num_heads * spec.head_dim, dtype=q.dtype, device=q.device)
        tensors = (q, cache.k.squeeze(2), cache.v.squeeze(2))
        for group in plan:
            shape = (group.rows, group.length)
            qs, ks, vs = (x[: len(q)][group.gather].unflatten(0, shape).transpose(1, 2) for x in tensors)
            mask = group.mask
            if isinstance(heads, Pairs):
                added = heads.added(qs, ks)
                mask = added if mask is None else added + mask
            y = scaled_dot_product_attention(
                qs, ks, vs, attn_mask=mask, scale=scale, enable_gqa=spec.num_heads != spec.num_kv_heads
            )
            flat = y.transpose(1, 2).reshape(group.rows * group.length, -1)
            out[group.tokens] = flat if group.real is None else flat[group.real]
        return out

    def _group(self, rows: list[int], starts: np.ndarray, lengths: np.ndarray, num_keys: np.ndarray) -> Group:
        counts = lengths[rows]
        length = int(counts.max())
        mask = self._mask(num_keys[rows], length)
        if counts.min() == length and rows[-1] - rows[0] == len(rows) - 1:
            tokens = slice(int(starts[rows[0]]), int(starts[rows[-1] + 1]))
            return Group(len(rows), length, tokens, None, tokens, mask)
        places = np.arange(length)
        within = places < counts[:, None]
        gather = self._upload((starts[rows][:, None] + np.where(within, places, 0)).ravel())
        if within.all():
            return Group(len(rows), length, gather, None, gather, mask)
        real = self._upload(np.flatnonzero(within))
        return Group(len(rows), length, gather, real, gather[real], mask)

    def _mask(self, num_keys: np.ndarray, length: int) -> torch.Tensor | None:
        """Of rows of `length` places: keys that are none, and keys too far away."""
        keys, window = torch.arange(length), self._spec.scores.window
        hidden = torch.zeros(1, 1, 1, length, dtype=torch.bool)
        if num_keys.min() < length:
            hidden = (keys >= torch.from_numpy(num_keys)[:, None])[:, None, None]
        if window and window < length:
            hidden = hidden | ((keys[:, None] - keys).abs() >= window)
        if not hidden.any():
            return None
        mask = torch.zeros(hidden.shape, dtype=self._spec.dtype).masked_fill_(hidden, float("-inf"))
        # Padding sees something, whatever the window, so that nothing becomes NaN.
        return mask.masked_fill_(hidden.all(-1, keepdim=True), 0.0).to(self._spec.device)

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._spec.device)
