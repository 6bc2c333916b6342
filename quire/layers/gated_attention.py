"""Attention whose output goes through a gate before it is projected back (Qwen3-Next)."""

from __future__ import annotations

import torch

from quire.attention.context import StepContext
from quire.kernels.attention.rope import qk_norm_rope_write
from quire.kernels.elementwise.gated_norm import gate_only
from quire.layers.attention import Attention, QKNorm
from quire.layers.linear import Linear, Stored
from quire.layers.norm import Norm


class GatedAttention(Attention):
    """Checkpoints have the gate's rows in q_proj: for each head those of its queries, then those of its gate."""

    takes_pieces = False

    def __init__(
        self,
        index: int,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos_sin: torch.Tensor,
        *,
        qk_norm: QKNorm,
        bias: bool,
    ) -> None:
        rows = num_heads * head_dim
        parts = {
            "q_proj": rows, "k_proj": num_kv_heads * head_dim, "v_proj": num_kv_heads * head_dim, "gate": rows,
        }  # fmt: skip
        queries, gates = (
            tuple(((2 * head + gate) * head_dim, (2 * head + gate + 1) * head_dim) for head in range(num_heads))
            for gate in (0, 1)
        )
        stored = {"q_proj": Stored("q_proj", 2 * rows, queries), "gate": Stored("q_proj", 2 * rows, gates)}
        projection = Linear(
            hidden, sum(parts.values()), bias=bias, parts=parts, role="rows",
            heads=(num_heads, num_kv_heads, num_kv_heads, num_heads), stored=stored,
        )  # fmt: skip
        super().__init__(
            index, hidden, num_heads, num_kv_heads, head_dim, cos_sin, qk_norm=qk_norm, qkv=projection, out_bias=bias
        )

    def add(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        cache, place, group = self._place(ctx)
        heads, kv_heads, head_dim = self.heads
        qkv, gate = self.qkv_proj(x, norm).split([(heads + 2 * kv_heads) * head_dim, heads * head_dim], dim=1)
        q = qk_norm_rope_write(self._prepare(qkv), *place)
        attended = group.backend.run(q, cache, group.plan, self.scale, self._per_head)
        y: torch.Tensor = self.o_proj(gate_only(attended, gate, sigmoid=True), residual=residual)
        return y
