"""Attention over the paged KV cache: `decode` for rows of one query token, `prefill` for rows of many.

Caches are [num_blocks, num_kv_heads, block_size, head_dim], both of the same strides, the last two dims contiguous.
Token t of the row in seat s lies in block `block_table[s, t // block_size]`. Query heads g*n … g*n + g-1 share KV head
n (g heads a group). Caches may be of an 8-bit float type while q is not: what is read is widened to q's type. What
scores get besides the scale, and which tokens a query sees, is said by `Scores` once a step, and by `PerHead` of each
layer. `out` (contiguous) takes the result where given. The kernel launched just before may write q and the KV of the
rows' newest tokens; everything else, the integer tensors too, is read ahead of that one's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quire.kernels.attention.scores import ALIKE, PLAIN, PerHead, Scores
from quire.kernels.dispatch import device_on_cuda, device_on_triton, on_triton

if TYPE_CHECKING:
    from quire.kernels.attention.triton import decode as decode_kernels


def decode_workspace(
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    drafted: tuple[int, int] = (0, 1),
) -> torch.Tensor:
    """Scratch memory for `decode` of up to `max_rows` rows, shared by all layers of one stream; starts as zeros.

    drafted: (rows, queries each) of the largest step with several queries a row.
    """
    if not device_on_triton(device):
        return torch.empty(0, device=device)
    from quire.kernels.attention.triton.decode import workspace_elements
    from quire.kernels.triton.launch import num_processors

    size = workspace_elements(max_rows, num_heads, num_kv_heads, head_dim, num_processors(device), drafted)
    return torch.zeros(size, dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class DecodeSchedule:
    """The decode rows of a step and how they are shared out among programs, for all layers."""

    seats: torch.Tensor
    seq_lens: torch.Tensor
    scores: Scores
    shares: decode_kernels.Schedule | None  # None: plain torch, which goes row by row
    drafted: tuple[int, torch.Tensor] | None = None


def decode_schedule(
    seats: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    scores: Scores = PLAIN,
    prefix: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    drafted: tuple[int, torch.Tensor] | None = None,
) -> DecodeSchedule:
    """Once a step, for `decode` of its layers: seats, seq_lens int32 [rows]; row i sees its `seq_lens[i]` tokens.

    drafted, for rows of several query tokens, (queries of each row, int32 [rows]): the first query of row i sees so
    many tokens, each other one more up to `seq_lens[i]`; those that then see no more than the one before are padding.
    Not together with `prefix`.

    Made on the device from what the tensors hold then, so it is part of what a CUDA graph captures. `prefix`, for rows
    whose first tokens lie in the same blocks (all int32): leading tokens a row shares with others [rows], row numbers
    tile after tile [rows], and tiles [tiles, 4] of at most `prefix_tile_rows` rows: seat of any of the rows, first
    place among the row numbers, rows (0: unused tile), shared tokens. It changes how often they are read, nothing else.
    """
    if not on_triton(seq_lens):
        return DecodeSchedule(seats, seq_lens, scores, None, drafted)
    from quire.kernels.attention.triton import decode

    shares = decode.schedule(
        seats, seq_lens, num_heads, num_kv_heads, head_dim, kv_dtype.itemsize, scores, prefix, drafted=drafted
    )
    return DecodeSchedule(seats, seq_lens, scores, shares)


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    schedule: DecodeSchedule,
    scale: float,
    workspace: torch.Tensor,
    out: torch.Tensor | None = None,
    heads: PerHead = ALIKE,
) -> torch.Tensor:
    """q [queries, num_heads, head_dim], row after row → [queries, num_heads * head_dim]; `schedule` says whose these
    are.

    block_table int32 [seats, blocks]; `workspace` from `decode_workspace`. Nothing is read back from the device, and
    the launches depend on shapes only: fit for CUDA graphs.
    """
    if schedule.shares is not None:
        from quire.kernels.attention.triton import decode

        return decode.decode(
            q, k_cache, v_cache, block_table, schedule.shares, scale, workspace, schedule.scores, heads, out
        )
    seats, seq_lens = schedule.seats, schedule.seq_lens
    if schedule.drafted is not None:
        return _drafted_reference(q, k_cache, v_cache, block_table, schedule, *schedule.drafted, scale, out, heads)
    query_start = torch.arange(len(seats) + 1, dtype=torch.int32, device=q.device)
    result = attention_reference(
        q,
        k_cache,
        v_cache,
        seats,
        block_table,
        query_start,
        seq_lens,
        len(seats),
        scale,
        schedule.scores,
        heads,
    )
    return result if out is None else out.copy_(result)


def _drafted_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    schedule: DecodeSchedule,
    queries: int,
    first_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None,
    heads: PerHead,
) -> torch.Tensor:
    """Query by query, each a row of its own."""
    place = torch.arange(queries, dtype=torch.int32, device=q.device)
    seen = torch.minimum(first_lens.unsqueeze(1) + place, schedule.seq_lens.unsqueeze(1)).flatten()
    seats = schedule.seats.repeat_interleave(queries)
    each = torch.arange(len(seen) + 1, dtype=torch.int32, device=q.device)
    result = attention_reference(
        q,
        k_cache,
        v_cache,
        seats,
        block_table,
        each,
        seen,
        len(seen),
        scale,
        schedule.scores,
        heads,
    )
    return result if out is None else out.copy_(result)


@dataclass(frozen=True, slots=True)
class PrefillSchedule:
    """The rows of a step that have many query tokens, for all layers."""

    seats: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    scores: Scores
    tiles: torch.Tensor | None  # None: the kernel that runs finds them itself


def prefill_schedule(
    seats: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    kv_dtype: torch.dtype,
    scores: Scores = PLAIN,
    *,
    is_far: bool = False,
) -> PrefillSchedule:
    """Once a step, for `prefill` of its layers: seats, seq_lens int32 [rows], query_start int32 [rows + 1].

    Row i's queries are tokens `query_start[i] … query_start[i + 1] - 1`, counted from `query_start[0]`, which is q's
    first; query j of n sees the row's first `seq_lens[i] - n + j + 1` tokens. `max_query_len` bounds n from above,
    `num_tokens` their sum. is_far: a row has many tokens before its queries, so that attention is most of the work even
    for few queries. Made on the device from what the tensors hold then, so it is part of what a CUDA graph
    captures.
    """
    tiles = None
    if on_triton(seats) and len(seats) and has_waves(scores):
        from quire.kernels.attention.triton import prefill

        tiles = prefill.schedule(
            seats, query_start, seq_lens, num_tokens, max_query_len, num_heads, num_kv_heads, head_dim, block_size,
            kv_dtype, is_far,
        )  # fmt: skip
    return PrefillSchedule(seats, query_start, seq_lens, max_query_len, scores, tiles)


def has_waves(scores: Scores) -> bool:
    """Whether the kernel that goes by waves, where there is one, does all that they ask for."""
    return scores.are_plain and not scores.chunked


def prefill_wave(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, kv_dtype: torch.dtype, device: torch.device
) -> int:
    """Query tokens of one row that occupy the device once, where `prefill` of fewer that are far takes as long; 0: it
    does not."""
    if not device_on_cuda(device):
        return 0
    from quire.kernels.attention.triton import prefill

    return prefill.wave(num_heads, num_kv_heads, head_dim, block_size, kv_dtype, device)


def prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    schedule: PrefillSchedule,
    scale: float,
    out: torch.Tensor | None = None,
    heads: PerHead = ALIKE,
) -> torch.Tensor:
    """q [tokens, num_heads, head_dim] → [tokens, num_heads * head_dim], causal; `schedule` says whose tokens."""
    seats, query_start, seq_lens = schedule.seats, schedule.query_start, schedule.seq_lens
    if on_triton(q):
        from quire.kernels.attention.triton import prefill

        return prefill.prefill(
            q, k_cache, v_cache, seats, block_table, query_start, seq_lens, schedule.max_query_len, scale,
            schedule.scores, heads, schedule.tiles, out,
        )  # fmt: skip
    result = attention_reference(
        q,
        k_cache,
        v_cache,
        seats,
        block_table,
        query_start,
        seq_lens,
        len(seats),
        scale,
        schedule.scores,
        heads,
    )
    return result if out is None else out.copy_(result)


def attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seats: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rows: int,
    scale: float,
    scores: Scores = PLAIN,
    heads: PerHead = ALIKE,
) -> torch.Tensor:
    """Row by row in float32 (float64 stays): simple, slow, on any device."""
    num_heads, dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(len(q), num_heads, v_cache.shape[3])
    starts = (query_start[: num_rows + 1] - query_start[0]).tolist()
    for row, (seat, seq_len) in enumerate(zip(seats[:num_rows].tolist(), seq_lens[:num_rows].tolist(), strict=True)):
        before = seq_len - (starts[row + 1] - starts[row])
        first = scores.first_seen(before) // block_size  # block that is seen
        blocks = block_table[seat, first : -(-seq_len // block_size)].long()
        k, v = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, : seq_len - first * block_size].to(wide)
            for cache in (k_cache, v_cache)
        )  # [kv heads, tokens, dim]
        queries = q[starts[row] : starts[row + 1]].to(wide).transpose(0, 1)  # [heads, queries, dim]
        grouped = queries.reshape(num_kv_heads, num_heads // num_kv_heads, -1, dim)
        products = torch.einsum("ngqd,ntd->ngqt", grouped, k) * scale
        last = torch.arange(before, seq_len, device=q.device)[:, None]  # the query's own token
        token = torch.arange(first * block_size, seq_len, device=q.device)[None, :]
        weights = _weights_reference(products, token, last, scores, heads)
        mixed = torch.einsum("ngqt,ntd->ngqd", weights, v).flatten(0, 1)
        out[starts[row] : starts[row + 1]] = mixed.transpose(0, 1).to(q.dtype)
    return out.flatten(1)


def _weights_reference(
    products: torch.Tensor, token: torch.Tensor, last: torch.Tensor, scores: Scores, heads: PerHead
) -> torch.Tensor:
    """products [kv heads, group, queries, tokens] → the same, what values are weighed by. token [1, tokens] are seen by
    queries at last [queries, 1]."""
    if scores.softcap:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    sinks, slopes = (None if own is None else own.to(products).view(*products.shape[:2], 1, 1) for own in heads)
    if slopes is not None:
        products = products + slopes * (token - last)
    products = products.masked_fill(~scores.visible(token, last), float("-inf"))
    if sinks is None:
        return products.softmax(-1)
    return torch.cat([products, sinks.expand(*products.shape[:3], 1)], -1).softmax(-1)[..., :-1]
