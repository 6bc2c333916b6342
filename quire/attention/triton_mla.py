"""Attention over latent rows through our own Triton kernels: the first choice for MLA on NVIDIA GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.attention.base import ALIKE, PLAIN, AttentionInputs, AttentionSpec, LayerCache, PerHead
from quire.attention.triton import refuses_device
from quire.kernels.attention import latent_expanded, latent_paged
from quire.kernels.attention.latent_rows import LatentRows

MAX_RANK, MAX_ROPE = 512, 128
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LatentPlan:
    inputs: AttentionInputs
    decodes: latent_paged.LatentSchedule | None  # None: no such rows
    expanded: latent_expanded.ExpandedSchedule | None  # of the others; None: they are absorbed, or there are none


class TritonLatentAttention:
    """Decode rows in shares of their tokens, the others tile by tile; everything is found on the device."""

    name = "triton_mla"
    reads_host = False
    graph_support = True
    prefix_support = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.cached = LatentRows(spec.value_dim, spec.head_dim - spec.value_dim, spec.block_size, spec.kv_dtype)
        self.workspace = latent_paged.decode_workspace(
            spec.max_rows, spec.num_heads, spec.value_dim, spec.head_dim - spec.value_dim, spec.device, spec.drafted
        )
        self.prompt_wave = 0
        self.room: torch.Tensor | None = None  # None: no kernel attends in the expanded form
        rank, rope = spec.value_dim, spec.head_dim - spec.value_dim
        if spec.made and latent_expanded.takes(rank, rope, spec.made, spec.dtype, spec.device):
            most = spec.max_rows * spec.max_seq_len
            self.room = latent_expanded.workspace(
                spec.num_heads, spec.head_dim, spec.made, most, spec.dtype, spec.device
            )
            self.prompt_wave = latent_expanded.wave(spec.num_heads, spec.device)

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        if not spec.value_dim:
            return "is for latent rows (MLA) alone"
        if spec.dtype not in DTYPES:
            return f"dtype {spec.dtype} is none of {', '.join(map(str, DTYPES))}"
        if spec.value_dim > MAX_RANK or spec.head_dim - spec.value_dim > MAX_ROPE:
            return f"rows of {spec.value_dim} + {spec.head_dim - spec.value_dim} are more than {MAX_RANK} + {MAX_ROPE}"
        if spec.scores != PLAIN:
            return "its scores are products of queries and rows, and all of a text counts"
        return refuses_device(spec)

    def plan(self, inputs: AttentionInputs) -> LatentPlan:
        split, spec = inputs.num_decodes, self.spec
        if not split:
            return LatentPlan(inputs, None, self._expanded(inputs))
        drafted = None if inputs.first_lens is None else (inputs.num_queries, inputs.first_lens[:split])
        decodes = latent_paged.decode_schedule(
            inputs.seats[:split], inputs.seq_lens[:split], spec.num_heads, self.cached, drafted
        )
        return LatentPlan(inputs, decodes, self._expanded(inputs))

    def _expanded(self, inputs: AttentionInputs) -> latent_expanded.ExpandedSchedule | None:
        """None: the step's prompts are attended for in the absorbed form, or there are none."""
        spec, split, work = self.spec, inputs.num_decodes, inputs.prompts
        if self.room is None or work is None or split == inputs.num_rows:
            return None
        assert spec.made is not None
        tokens, rank = inputs.num_tokens - split, spec.value_dim
        costs = latent_expanded.costs(tokens, inputs.num_rows - split, spec.num_heads, spec.device)
        if not latent_expanded.pays(work, tokens, rank, spec.head_dim - rank, spec.made, costs):
            return None
        return latent_expanded.schedule(
            inputs.seats[split:], inputs.query_start[split:], inputs.seq_lens[split:], work.context, tokens,
            inputs.max_query_len, spec.num_heads, spec.head_dim, spec.made, self.room.numel(),
        )  # fmt: skip

    def absorbed(self, plan: LatentPlan) -> int | None:
        return plan.inputs.num_decodes if plan.expanded else None

    def run(
        self, q: torch.Tensor, cache: LayerCache, plan: LatentPlan, scale: float, heads: PerHead = ALIKE
    ) -> torch.Tensor:
        assert heads == ALIKE, "refused"
        inputs, rank = plan.inputs, self.spec.value_dim
        out = torch.empty((len(q), self.spec.num_heads * rank), dtype=q.dtype, device=q.device)
        table, split = inputs.block_table, inputs.num_decodes * inputs.num_queries
        if plan.decodes is not None:
            latent_paged.decode(q[:split], cache.k, rank, table, plan.decodes, scale, self.workspace, out[:split])
        if inputs.num_decodes < inputs.num_rows and plan.expanded is None:
            rows = slice(inputs.num_decodes, inputs.num_rows)
            latent_paged.prefill(
                q[split:], cache.k, rank, table, inputs.seats[rows], inputs.query_start[inputs.num_decodes :],
                inputs.seq_lens[rows], inputs.max_query_len, scale, out[split:],
            )  # fmt: skip
        return out

    def run_expanded(
        self, q: torch.Tensor, cache: LayerCache, weight: torch.Tensor, plan: LatentPlan, scale: float,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        assert plan.expanded is not None
        assert self.room is not None
        latent_expanded.attend(q, cache.k, weight, plan.inputs.block_table, plan.expanded, scale, self.room, out)
