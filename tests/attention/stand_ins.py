"""FlashInfer's and FlashAttention's calls as they are documented, in plain torch: what a backend hands over must mean
to them what it means to us. The libraries themselves need a GPU."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import torch


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int, *, causal: bool) -> torch.Tensor:
    """q [queries, heads, dim], k, v [tokens, kv_heads, dim]; the last query stands at the last token. left: tokens
    that a query sees before its own; -1: all."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,thd->hqt", q.double(), k) * scale
    position, token = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    hidden = (token > position) & causal | (token < position - left if left >= 0 else False)
    return torch.einsum("hqt,thd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).to(q.dtype)


class Wrapper:
    def __init__(self, workspace: torch.Tensor, kv_layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"
        assert options.keys() <= {"use_tensor_cores"}

    def _plan(
        self, queries: list[int], indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, window_left: int, sm_scale: float,
        q_data_type: torch.dtype, kv_data_type: torch.dtype, causal: bool,
    ) -> None:  # fmt: skip
        assert all(x.dtype == torch.int32 for x in (indptr, indices, last_page_len))
        assert len(indices) == indptr[-1]
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self._shape = (num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type)
        self._queries, self._indptr, self._indices, self._last = queries, indptr.tolist(), indices, last_page_len
        self._window_left, self._scale, self._causal = window_left, sm_scale, causal

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, q_scale: float
    ) -> torch.Tensor:
        heads, kv_heads, dim, size, q_type, kv_type = self._shape
        assert (q.shape[1:], q.dtype, paged_kv_cache[0].dtype) == ((heads, dim), q_type, kv_type)
        assert paged_kv_cache[0].shape[1:] == (kv_heads, size, dim)
        assert len(q) == self._queries[-1]
        out = []
        for row, (begin, end) in enumerate(itertools.pairwise(self._queries)):
            pages = self._indices[self._indptr[row] : self._indptr[row + 1]].long()
            tokens = (len(pages) - 1) * size + int(self._last[row])
            k, v = (x[pages].transpose(1, 2).reshape(-1, kv_heads, dim)[:tokens] for x in paged_kv_cache)
            scale = self._scale * q_scale
            out.append(attend(q[begin:end], k, v, scale, self._window_left, causal=self._causal))
        return torch.cat(out)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, **shape: Any) -> None:
        self._plan(list(range(len(indptr))), indptr, indices, last_page_len, causal=False, **shape)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, qo_indptr: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *,
        head_dim_qk: int, **shape: Any,
    ) -> None:  # fmt: skip
        assert qo_indptr.dtype == torch.int32
        self._plan(qo_indptr.tolist(), indptr, indices, last_page_len, head_dim=head_dim_qk, **shape)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    block_table: torch.Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """q [rows, queries, heads, dim]; caches [pages, tokens, kv_heads, dim]."""
    rows, queries = q.shape[:2]
    starts = torch.arange(rows + 1, dtype=torch.int32) * queries
    ends = torch.nn.functional.pad(cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    out = flash_attn_varlen_func(
        q.flatten(0, 1), k_cache, v_cache, starts, ends, queries, int(cache_seqlens.max()), block_table=block_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size,
    )  # fmt: skip
    return out.view(q.shape)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, *, block_table: torch.Tensor, softmax_scale: float, causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (cu_seqlens_q, cu_seqlens_k))
    assert block_table.dtype == torch.int32
    assert block_table.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape[1] % 256 == 0
    assert len(block_table) == len(cu_seqlens_k) - 1 == len(cu_seqlens_q) - 1
    assert len(q) == cu_seqlens_q[-1]
    lengths = cu_seqlens_k.diff().tolist()
    assert max(lengths) <= max_seqlen_k
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    out = []
    for pages, (begin, end), tokens in zip(
        block_table.long(), itertools.pairwise(cu_seqlens_q.tolist()), lengths, strict=True
    ):
        keys, values = (x[pages].flatten(0, 1)[:tokens] for x in (k, v))
        out.append(attend(q[begin:end], keys, values, softmax_scale, window_size[0], causal=causal))
    return torch.cat(out)


def modules() -> dict[str, ModuleType]:
    flashinfer, flash_attn = ModuleType("flashinfer"), ModuleType("flash_attn")
    for kind in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(flashinfer, kind.__name__, kind)
    for call in (flash_attn_with_kvcache, flash_attn_varlen_func):
        setattr(flash_attn, call.__name__, call)
    return {"flashinfer": flashinfer, "flash_attn": flash_attn}
