"""The contract of an attention backend: plan once a step, run once a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from quire.attention.context import AttentionInputs, LayerCache


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Shapes a backend is built for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    max_rows: int
    max_tokens: int
    max_seq_len: int
    sliding_window: int | None = None  # counts the current token


class AttentionBackend(Protocol):
    name: str
    graph_support: bool  # decode-only steps may be captured in a CUDA graph

    @staticmethod
    def refuses(spec: AttentionSpec) -> str | None:
        """Why this backend cannot serve `spec`; None if it can."""
        ...

    def __init__(self, spec: AttentionSpec) -> None:
        """Allocate workspaces (nothing is allocated later)."""
        ...

    def plan(self, inputs: AttentionInputs) -> Any:
        """Prepare a step; must not wait for the device."""
        ...

    def run(self, q: torch.Tensor, cache: LayerCache, plan: Any, scale: float) -> torch.Tensor:
        """Attend: q [tokens, heads, head_dim] over the paged cache (this step's KV is already written).

        Returns [tokens, heads * head_dim], causal: query j of a row with n queries sees seq_len - n + j + 1 tokens.
        """
        ...
