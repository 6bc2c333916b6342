"""Attention over the paged cache of latent rows: `decode` for rows of one query token, `prefill` for rows of many.

The cache is [num_blocks, 1, block_size, rank + rope], blocks contiguous. A token's row is its key for every head, the
row's first `rank` numbers are its value. Tables, seats, lengths and 8-bit caches are as in `paged.py`. The kernel
launched just before may write q and the rows' newest tokens; the integer tensors are read ahead of that one's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quire.kernels.attention import paged
from quire.kernels.attention.latent_rows import LatentRows
from quire.kernels.attention.scores import PLAIN
from quire.kernels.dispatch import device_on_triton, on_triton

if TYPE_CHECKING:
    from quire.kernels.attention.triton import latent_decode


def decode_workspace(
    max_rows: int, num_heads: int, rank: int, rope: int, device: torch.device, drafted: tuple[int, int] = (0, 1)
) -> torch.Tensor:
    """Scratch memory for `decode` of up to `max_rows` rows, shared by all layers of one stream.

    drafted: (rows, queries each) of the largest step with several queries a row.
    """
    if not device_on_triton(device):
        return torch.empty(0, device=device)
    from quire.kernels.attention.triton import latent_decode

    size = latent_decode.workspace_elements(max_rows, num_heads, rank, rope, device, drafted)
    return torch.empty(size, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class LatentSchedule:
    """The decode rows of a step and how they are shared out among programs, for all layers."""

    rows: paged.DecodeSchedule
    shares: latent_decode.Schedule | None  # None: plain torch, which goes row by row


def decode_schedule(
    seats: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    cached: LatentRows,
    drafted: tuple[int, torch.Tensor] | None = None,
) -> LatentSchedule:
    """Once a step, for `decode` of its layers: seats, seq_lens int32 [rows]; row i sees its `seq_lens[i]` tokens.

    drafted: as in `paged.decode_schedule`. Made on the device from what the tensors hold then, so it is part of what a
    CUDA graph captures.
    """
    rows = paged.DecodeSchedule(seats, seq_lens, PLAIN, None, drafted)
    if not on_triton(seq_lens):
        return LatentSchedule(rows, None)
    from quire.kernels.attention.triton import latent_decode

    return LatentSchedule(rows, latent_decode.schedule(seats, seq_lens, num_heads, cached, drafted))


def decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    block_table: torch.Tensor,
    schedule: LatentSchedule,
    scale: float,
    workspace: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [queries, num_heads, rank + rope], contiguous, row after row → [queries, num_heads * rank].

    `schedule` says whose these are; `workspace` is from `decode_workspace`. Nothing is read back from the device, and
    the launches depend on shapes only: fit for CUDA graphs.
    """
    if out is None:
        out = torch.empty((len(q), q.shape[1] * rank), dtype=q.dtype, device=q.device)
    if schedule.shares is not None:
        from quire.kernels.attention.triton import latent_decode

        return latent_decode.decode(q, cache, rank, block_table, schedule.shares, scale, workspace, out)
    return paged.decode(q, cache, cache[..., :rank], block_table, schedule.rows, scale, workspace, out)


def prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    block_table: torch.Tensor,
    seats: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [tokens, num_heads, rank + rope], contiguous → [tokens, num_heads * rank], causal.

    seats, seq_lens int32 [rows], query_start int32 [rows + 1]: as in `paged.prefill_schedule`. `max_query_len` bounds
    the queries of a row from above.
    """
    if out is None:
        out = torch.empty((len(q), q.shape[1] * rank), dtype=q.dtype, device=q.device)
    if on_triton(q):
        from quire.kernels.attention.triton import latent_prefill

        return latent_prefill.prefill(
            q, cache, rank, block_table, seats, query_start, seq_lens, max_query_len, scale, out
        )
    return out.copy_(
        paged.attention_reference(
            q, cache, cache[..., :rank], seats, block_table, query_start, seq_lens, len(seats), scale
        )
    )
