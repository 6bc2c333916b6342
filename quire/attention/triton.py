"""Attention through our own Triton kernels: the first choice on NVIDIA GPUs."""

from __future__ import annotations

import torch

from quire.attention.base import AttentionSpec
from quire.attention.context import AttentionInputs, LayerCache
from quire.kernels import paged_attention

MAX_HEAD_DIM = 256
MAX_GROUP = 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonAttention:
    """Decode rows through split-KV flash decoding, the others through a causal kernel over ragged rows.

    The plan is the step's inputs as they are: both kernels find their rows on the device.
    """

    name = "triton"
    graph_support = True
    prefix_support = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.sliding_window = spec.sliding_window or 0
        self.workspace = paged_attention.decode_workspace(
            spec.max_rows, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.device
        )

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        if spec.device.type != "cuda":
            return f"needs a CUDA device, not {spec.device.type}"
        if torch.cuda.get_device_capability(spec.device) < (8, 0):
            return f"needs compute capability 8.0, {torch.cuda.get_device_name(spec.device)} has less"
        if spec.dtype not in DTYPES:
            return f"dtype {spec.dtype} is none of {', '.join(map(str, DTYPES))}"
        if spec.head_dim > MAX_HEAD_DIM:
            return f"head_dim {spec.head_dim} is more than {MAX_HEAD_DIM}"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads do not divide among {spec.num_kv_heads} KV heads"
        if spec.num_heads // spec.num_kv_heads > MAX_GROUP:
            return f"{spec.num_heads // spec.num_kv_heads} query heads a KV head are more than {MAX_GROUP}"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "the triton package is not installed"
        return None

    def plan(self, inputs: AttentionInputs) -> AttentionInputs:
        return inputs

    def run(self, q: torch.Tensor, cache: LayerCache, plan: AttentionInputs, scale: float) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
        split = plan.num_decodes
        if split:
            paged_attention.decode(
                q[:split], cache.k, cache.v, plan.seats[:split], plan.block_table, plan.seq_lens[:split], scale,
                self.workspace, self.sliding_window, out[:split],
            )  # fmt: skip
        if split < plan.num_rows:
            paged_attention.prefill(
                q[split:], cache.k, cache.v, plan.seats[split:], plan.block_table, plan.query_start[split:],
                plan.seq_lens[split:], plan.num_rows - split, plan.max_query_len, scale, self.sliding_window,
                out[split:],
            )  # fmt: skip
        return out
