"""Attention through our own Triton kernels: the first choice on NVIDIA GPUs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from quire.attention.base import ALIKE, AttentionSpec, PerHead, prefix_tile_rows
from quire.attention.context import AttentionInputs, LayerCache
from quire.kernels.attention import paged as paged_attention
from quire.kernels.dispatch import device_on_cuda

MAX_HEAD_DIM = 256
MAX_QUERIES = 1 << 14  # numbers of the query heads that read one KV head, as tiles have them: what registers hold
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_CAPABILITY = {torch.float8_e4m3fn: (8, 9), torch.float8_e5m2: (8, 0)}  # that can convert it


@dataclass(frozen=True, slots=True)
class TritonPlan:
    inputs: AttentionInputs
    decodes: paged_attention.DecodeSchedule | None  # None: no such rows
    others: paged_attention.PrefillSchedule | None


def refuses_device(spec: AttentionSpec) -> str | None:
    """Why the device cannot run our kernels, or cannot keep such a cache; None: it can."""
    if spec.device.type != "cuda":
        return f"needs a CUDA device, not {spec.device.type}"
    if not device_on_cuda(spec.device):
        return "needs the platform cuda: this one is plain torch"
    if torch.cuda.get_device_capability(spec.device) < (8, 0):
        return f"needs compute capability 8.0, {torch.cuda.get_device_name(spec.device)} has less"
    if spec.dtype not in DTYPES:
        return f"dtype {spec.dtype} is none of {', '.join(map(str, DTYPES))}"
    if spec.kv_dtype != spec.dtype:
        needed = FP8_CAPABILITY.get(spec.kv_dtype)
        if needed is None or torch.cuda.get_device_capability(spec.device) < needed:
            return f"no cache of {spec.kv_dtype} on {torch.cuda.get_device_name(spec.device)}"
    return None if importlib.util.find_spec("triton") else "the triton package is not installed"


def _power_of_2(number: int) -> int:
    """The next one."""
    return 1 << (number - 1).bit_length()


class TritonAttention:
    """Decode rows through split-KV flash decoding, the others through a causal kernel over ragged rows.

    The plan shares the rows out among programs; everything else both kernels find on the device.
    """

    name = "triton"
    reads_host = False
    graph_support = True

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        # A window may begin within a prefix, and what tokens get by their distance differs by row.
        # Where a tile has room for one row's heads alone, no two rows can share what it reads.
        self.prefix_support = (
            not spec.scores.window
            and not spec.scores.slopes
            and prefix_tile_rows(spec.num_heads // spec.num_kv_heads) > 1
        )
        self.prompt_wave = 0
        if paged_attention.has_waves(spec.scores):
            self.prompt_wave = paged_attention.prefill_wave(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size, spec.kv_dtype, spec.device
            )
        self.workspace = paged_attention.decode_workspace(
            spec.max_rows, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.device, spec.drafted
        )

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        if (reason := refuses_device(spec)) is not None:
            return reason
        if spec.value_dim:
            return "latent rows, which are keys and values at once, are for triton_mla"
        if spec.scores.dual_chunk:
            return "queries that come three times (dual chunk attention) are for plain torch"
        if spec.head_dim > MAX_HEAD_DIM:
            return f"head_dim {spec.head_dim} is more than {MAX_HEAD_DIM}"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads do not divide among {spec.num_kv_heads} KV heads"
        group = spec.num_heads // spec.num_kv_heads
        if _power_of_2(group) * _power_of_2(spec.head_dim) > MAX_QUERIES:
            return f"{group} query heads a KV head, of {spec.head_dim} numbers each, are more than a tile holds"
        return None

    def plan(self, inputs: AttentionInputs) -> TritonPlan:
        split, spec, shared = inputs.num_decodes, self.spec, inputs.prefix
        decodes = others = None
        if split:
            decodes = paged_attention.decode_schedule(
                inputs.seats[:split], inputs.seq_lens[:split], spec.num_heads, spec.num_kv_heads, spec.head_dim,
                spec.kv_dtype, spec.scores,
                (shared.tokens_of_row, shared.members, shared.tiles) if shared else None,
                None if inputs.first_lens is None else (inputs.num_queries, inputs.first_lens[:split]),
            )  # fmt: skip
        if split < inputs.num_rows:
            rows = slice(split, inputs.num_rows)
            others = paged_attention.prefill_schedule(
                inputs.seats[rows], inputs.query_start[split:], inputs.seq_lens[rows], inputs.num_tokens - split,
                inputs.max_query_len, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size,
                spec.kv_dtype, spec.scores, is_far=inputs.is_far,
            )  # fmt: skip
        return TritonPlan(inputs, decodes, others)

    def run(
        self, q: torch.Tensor, cache: LayerCache, plan: TritonPlan, scale: float, heads: PerHead = ALIKE
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
        table, split = plan.inputs.block_table, plan.inputs.num_decodes * plan.inputs.num_queries
        if plan.decodes is not None:
            paged_attention.decode(
                q[:split], cache.k, cache.v, table, plan.decodes, scale, self.workspace, out[:split], heads
            )
        if plan.others is not None:
            paged_attention.prefill(q[split:], cache.k, cache.v, table, plan.others, scale, out[split:], heads)
        return out
