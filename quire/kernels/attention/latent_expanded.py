"""Latent attention in the expanded form, for prompts: each head's keys and values are made of the latent rows that
the step's queries see, those of the cache too, and attended to as any others.

A product of a query and a key is then of nope + rope columns, where the absorbed form has rank + rope, and a value is
`value` wide instead of rank. Making them costs as much for a row as the absorbed form's two products cost for a query,
so it pays where the rows are few or have many queries each: `pays` counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.kernels.attention.paged import attention_reference
from quire.kernels.dispatch import device_on_cuda, on_triton

ABSORBED_COST = 3.0  # of an operation of the absorbed form's kernel in those of the kernel here, on an H100
ABSORBED_LINES = 64  # of a program of that kernel
WORKSPACE_BYTES = 512 * 2**20


class PromptWork(NamedTuple):
    """Of a step's rows of several queries, as counted on the host."""

    context: int  # tokens that they see, their own included: the rows' lengths, all together
    pairs: int  # of a query and a token that it sees


class HeadDims(NamedTuple):
    """Columns that each head makes of a latent row: of keys without positions, and of values."""

    nope: int
    value: int


class Costs(NamedTuple):
    """How many times as long as of the products around it an operation of attention takes in either form."""

    absorbed: float
    expanded: float


EVEN = Costs(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class ExpandedSchedule:
    """The prompt rows of a step, for all layers."""

    seats: torch.Tensor
    starts: torch.Tensor  # int32 [rows]: where each one's latent rows begin in the workspace
    seq_lens: torch.Tensor
    items: torch.Tensor  # see `prefill_schedule`; the last column is `starts`
    context: int
    heads: int  # that are attended for at a time
    counters: torch.Tensor  # int32, one for each time


def takes(rank: int, rope: int, dims: HeadDims, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a kernel for such heads."""
    if not device_on_cuda(device):
        return False
    from quire.kernels.triton.launch import has_gluon_sm90

    if not has_gluon_sm90(device):
        return False
    from quire.kernels.attention.triton import latent_prompt_sm90

    return latent_prompt_sm90.takes(rank, rope, dims.nope, dims.value, dtype)


def wave(num_heads: int, device: torch.device) -> int:
    """Query tokens of one row that give every processor an item, where there is a kernel."""
    from quire.kernels.attention.triton import latent_prompt_sm90
    from quire.kernels.triton.launch import num_processors

    return max(num_processors(device) // num_heads, 1) * latent_prompt_sm90.TOKENS


def workspace(
    num_heads: int, width: int, dims: HeadDims, max_context: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Scratch memory for `attend`, shared by all layers of one stream. width: of a latent row. max_context: that any
    step sees; of more than there is room for, heads are attended for one after the other, or not in this form."""
    most = max_context * (width + num_heads * sum(dims))
    return torch.empty(min(most, WORKSPACE_BYTES // dtype.itemsize), dtype=dtype, device=device)


def pays(work: PromptWork, num_tokens: int, rank: int, rope: int, dims: HeadDims, costs: Costs = EVEN) -> bool:
    """Whether it takes less than the absorbed form, which makes no rows' columns, but of each token's queries and
    results as many."""
    made = rank * sum(dims)
    expanded = costs.expanded * work.pairs * (dims.nope + rope + dims.value) + work.context * made
    return expanded < costs.absorbed * work.pairs * (2 * rank + rope) + num_tokens * made


def costs(num_tokens: int, num_rows: int, num_heads: int, device: torch.device) -> Costs:
    """Where there is a kernel, for so many queries of so many rows: of few, most processors have nothing to do."""
    from quire.kernels.attention.triton.latent_prompt_sm90 import TOKENS
    from quire.kernels.triton.launch import num_processors

    processors, tiles = num_processors(device), _tiles(num_tokens, num_rows, TOKENS)
    expanded = TOKENS * tiles / num_tokens * max(processors / (tiles * num_heads), 1.0)
    absorbed = ABSORBED_COST * max(processors * ABSORBED_LINES / (num_tokens * num_heads), 1.0)
    return Costs(absorbed, expanded)


def _tiles(num_tokens: int, num_rows: int, tokens: int) -> int:
    """About how many there are of a head: a row's last one is half full."""
    return -(-num_tokens // tokens) + num_rows // 2


def heads_at_a_time(num_heads: int, fit: int, tiles: int, processors: int) -> int:
    """Of those that fit as many as leave the fewest processors idle, with so many tiles a head."""
    if fit >= num_heads:
        return num_heads

    def rounds(heads: int) -> int:
        whole, rest = divmod(num_heads, heads)
        return whole * -(-heads * tiles // processors) + -(-rest * tiles // processors)

    return min(range(fit, 0, -1), key=rounds)


def schedule(
    seats: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    context: int,
    num_tokens: int,
    max_query_len: int,
    num_heads: int,
    width: int,
    dims: HeadDims,
    room: int,
) -> ExpandedSchedule | None:
    """Once a step, for `attend` of its layers; None: there is no room. Rows are as in `paged.prefill_schedule`.

    context: tokens that these rows see, all together, or more. width: of a latent row. room: elements of the workspace.
    """
    from quire.kernels.attention.triton import latent_prompt_sm90, prefill_schedule
    from quire.kernels.triton.launch import num_processors

    tokens = latent_prompt_sm90.TOKENS
    fit = (room // max(context, 1) - width) // sum(dims)
    if fit < 1:
        return None
    tiles = _tiles(num_tokens, len(seats), tokens)
    heads = heads_at_a_time(num_heads, fit, tiles, num_processors(seats.device))
    starts = seq_lens.cumsum(0, dtype=torch.int32) - seq_lens
    items = prefill_schedule.tiles(starts, query_start, seq_lens, num_tokens, max_query_len, tokens)
    counters = torch.empty(-(-num_heads // heads), dtype=torch.int32, device=seats.device)
    return ExpandedSchedule(seats, starts, seq_lens, items, context, heads, counters)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    weight: torch.Tensor,
    block_table: torch.Tensor,
    plan: ExpandedSchedule,
    scale: float,
    workspace: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of the scheduled rows' queries, with rotated columns, to their tokens in the cache.

    weight: what makes of a latent row's first `rank` numbers each head's key, without the rotary columns, and its
    value. `workspace` is from there. Nothing is read back from the device.

    Shapes:
        q [tokens, heads, nope + rope], contiguous; cache [blocks, 1, block_size, rank + rope]; weight [heads, nope +
        value, rank], contiguous; out [tokens, heads, value], contiguous, which is returned.
    """
    from quire.kernels.attention.triton import latent_prompt_sm90

    (num_heads, columns, rank), width = weight.shape, cache.shape[3]
    rows = workspace[: plan.context * width].view(plan.context, width)
    gather_rows(cache, block_table, plan.seats, plan.starts, plan.seq_lens, plan.counters, rows)
    for number, first in enumerate(range(0, num_heads, plan.heads)):
        part = weight[first : first + plan.heads].flatten(0, 1)
        kv = workspace[plan.context * width :][: plan.context * len(part)].view(plan.context, len(part))
        torch.mm(rows[:, :rank], part.t(), out=kv)
        latent_prompt_sm90.attend(q, kv, rows, columns, rank, plan.items, plan.counters[number:], first, scale, out)
    return out


def gather_rows(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seats: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    counters: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Rows' tokens out of the cache, row i's from line `starts[i]` on, zeros behind the last; counters become 0.

    seats, starts (rising), seq_lens: int32 [rows]. out: [tokens, width].
    """
    if on_triton(cache):
        from quire.kernels.attention.triton import gather_latents

        gather_latents.gather_rows(cache, block_table, seats, starts, seq_lens, counters, out)
    else:
        gather_rows_reference(cache, block_table, seats, starts, seq_lens, counters, out)


def gather_rows_reference(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seats: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    counters: torch.Tensor,
    out: torch.Tensor,
) -> None:
    counters.zero_()
    line, size = torch.arange(len(out), device=out.device), cache.shape[2]
    row = torch.searchsorted(starts.long(), line, right=True) - 1
    position = line - starts[row]
    there = position < seq_lens[row]
    blocks = block_table[seats[row].long(), torch.where(there, position // size, 0)].long()
    found = cache[blocks, 0, position % size].to(out.dtype)
    out.copy_(torch.where(there[:, None], found, 0))


def attend_reference(
    q: torch.Tensor,
    cache: torch.Tensor,
    weight: torch.Tensor,
    block_table: torch.Tensor,
    seats: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """What `attend` computes, row by row, in the type that weight has."""
    rank = weight.shape[2]
    nope, rope = q.shape[2] - (cache.shape[3] - rank), cache.shape[3] - rank
    made = torch.einsum("btsr,hcr->bhsc", cache[..., :rank].to(weight.dtype), weight)
    shared = cache[..., rank:].to(weight.dtype).expand(-1, len(weight), -1, rope)
    keys = torch.cat([made[..., :nope], shared], dim=-1)
    return attention_reference(q, keys, made[..., nope:], seats, block_table, query_start, seq_lens, len(seats), scale)
