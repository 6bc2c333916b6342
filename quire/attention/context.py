"""StepContext: what the layers must know of a step, handed through `forward(x, ctx)`. No global state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from quire.attention.base import AttentionBackend


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """A step as attention sees it. All tensors live on the device, int32.

    Rows [0, num_decodes) hold one query token each, the others `query_start[i+1] - query_start[i]`.
    Row i attends to `seq_lens[i]` tokens, its own included, found through
    `block_table[seats[i], position // block_size]`. Padding rows have seat 0 and seq_len 1 (null block).
    """

    num_rows: int
    num_tokens: int
    num_decodes: int
    max_query_len: int  # of the rows that are not decodes; 0 if there are none
    max_seq_len: int  # upper bound over the rows; with graphs: the model's longest
    seats: torch.Tensor  # [rows]
    query_start: torch.Tensor  # [rows + 1]
    seq_lens: torch.Tensor  # [rows]
    block_table: torch.Tensor  # [max_seats + 1, max_blocks]
    # Host copies, for backends that loop in Python (CPU); None while a graph is captured.
    seats_host: list[int] | None = None
    query_start_host: list[int] | None = None
    seq_lens_host: list[int] | None = None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """KV of one layer, paged: [num_blocks, kv_heads, block_size, head_dim] each."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepContext:
    positions: torch.Tensor  # int32 [tokens]
    slots: torch.Tensor  # int32 [tokens]: block * block_size + offset where the token's KV goes
    caches: list[LayerCache]  # one a layer
    backend: AttentionBackend
    plan: Any  # what `backend.plan` returned for this step
