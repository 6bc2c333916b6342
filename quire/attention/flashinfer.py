"""Attention by FlashInfer, where it is installed: its layout "HND" is the cache's own.

Its planner runs on the CPU, from host copies, and cannot be captured: steps are launched from Python.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from quire.attention.base import ALIKE, AttentionInputs, AttentionSpec, LayerCache, PerHead
from quire.attention.library import missing, refuses_as_all_do
from quire.platforms.transfers import upload

HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    num_decodes: int
    end: int  # of the tokens that are somebody's


@dataclass(frozen=True, slots=True)
class Paging:
    """Which pages some rows see; all int32, `indices` on the device, the others on the host."""

    indptr: torch.Tensor  # [rows + 1]: where each row's pages begin
    indices: torch.Tensor  # [pages]
    last_page_len: torch.Tensor  # [rows]


class FlashInferAttention:
    name = "flashinfer"
    reads_host = True
    graph_support = False
    prefix_support = False
    prompt_wave = 0

    def __init__(self, spec: AttentionSpec) -> None:
        import flashinfer

        self._spec = spec
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        # Its kernels without matrix units know few numbers of query heads a KV head.
        self._decode: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=spec.num_heads > spec.num_kv_heads
        )
        self._prefill: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        # A plan leaves through one piece of pinned memory, which the next must not overwrite on its way.
        self._planned = torch.cuda.Event() if spec.device.type == "cuda" else None

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        if (reason := missing("flashinfer", (0, 2))) is not None:
            return reason
        if spec.planes > 1:
            return "its pages follow one another, and here those of several layers lie between"
        return refuses_as_all_do(spec, HEAD_DIMS)

    def plan(self, inputs: AttentionInputs) -> FlashInferPlan:
        starts, lengths = inputs.query_start_host, inputs.seq_lens_host
        if starts is None or lengths is None:
            raise ValueError("this attention is planned from host copies of the step's rows")
        spec, split = self._spec, inputs.num_decodes
        if self._planned is not None:
            self._planned.synchronize()
        shape = {
            "page_size": spec.block_size, "window_left": spec.scores.window - 1, "sm_scale": 1.0,
            "q_data_type": spec.dtype, "kv_data_type": spec.kv_dtype,
        }  # fmt: skip
        if split:
            pages = self._pages(inputs, range(split), lengths, lengths)
            self._decode.plan(
                pages.indptr, pages.indices, pages.last_page_len, num_qo_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, **shape,
            )  # fmt: skip
        if split < inputs.num_rows:
            counts = [end - start for start, end in itertools.pairwise(starts)]
            firsts = [length - count + 1 for length, count in zip(lengths, counts, strict=True)]
            pages = self._pages(inputs, range(split, inputs.num_rows), firsts, lengths)
            queries = torch.tensor(starts[split:], dtype=torch.int32) - starts[split]
            self._prefill.plan(
                queries, pages.indptr, pages.indices, pages.last_page_len, num_qo_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads, head_dim_qk=spec.head_dim, causal=True, **shape,
            )  # fmt: skip
        if self._planned is not None:
            self._planned.record()
        return FlashInferPlan(split, starts[-1])

    def run(
        self, q: torch.Tensor, cache: LayerCache, plan: FlashInferPlan, scale: float, heads: PerHead = ALIKE
    ) -> torch.Tensor:
        assert heads == ALIKE, "refused"
        out, split, end = torch.zeros_like(q), plan.num_decodes, plan.end
        # Both multiply by the plan's scale, which is 1, and by a scale that queries are said to have.
        if split:
            out[:split] = self._decode.run(q[:split], (cache.k, cache.v), q_scale=scale)
        if split < end:
            out[split:end] = self._prefill.run(q[split:end], (cache.k, cache.v), q_scale=scale)
        return out.flatten(1)

    def _pages(self, inputs: AttentionInputs, rows: range, firsts: list[int], lengths: list[int]) -> Paging:
        """firsts: tokens up to each row's first query: with a window, pages before all that it sees are left out."""
        size, window = self._spec.block_size, self._spec.scores.window
        begin = torch.tensor([max(0, firsts[row] - window) // size if window else 0 for row in rows], dtype=torch.int32)
        ends = torch.tensor([lengths[row] for row in rows], dtype=torch.int32)
        indptr = torch.nn.functional.pad(((ends + size - 1) // size - begin).cumsum(0, dtype=torch.int32), (1, 0))
        total, device = int(indptr[-1]), self._spec.device
        starts = upload(indptr, device)
        row = torch.repeat_interleave(torch.arange(len(rows), device=device), starts.diff(), output_size=total)
        number = torch.arange(total, device=device) - starts[row] + upload(begin, device)[row]
        seats = inputs.seats[rows.start : rows.stop].long()
        indices = inputs.block_table[seats[row], number]
        return Paging(indptr, indices, (ends - 1) % size + 1)
