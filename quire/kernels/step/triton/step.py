"""Triton twins of `kernels/step/step.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from quire.kernels.step.state import GroupTable, SeatState, StepBuffers

_ROWS = 128  # rows a program, where a program handles rows
_TOKENS = 512  # tokens of one row a program, in gather


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["index", "values"])
def _scatter(dst, index, values, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(dst + tl.load(index + i, mask=mask, other=0), tl.load(values + i, mask=mask), mask=mask)


def scatter(dst: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    n = index.numel()
    _scatter[(-(-n // 1024),)](dst, index, values, n, BLOCK=1024)


@triton.jit(
    do_not_specialize=["rows", "num_tokens", "num_decodes", "max_blocks"],
    do_not_specialize_on_alignment=["seats", "query_start", "staged_ids"],
)
def _gather(
    last_token,
    num_computed,
    block_table,
    token_of_slot,
    seats,
    query_start,
    staged_ids,
    input_ids,
    positions,
    slots,
    seq_lens,
    limits,
    rows,
    num_tokens,
    num_decodes,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    LIMITED: tl.constexpr,
):
    row = tl.program_id(0)
    j = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    if row == rows:  # behind the last one: padding
        at = tl.load(query_start + row) + j
        nothing = tl.zeros([TOKENS], tl.int32)
        tl.store(input_ids + at, nothing, mask=at < num_tokens)
        tl.store(positions + at, nothing, mask=at < num_tokens)
        tl.store(slots + at, nothing - 1, mask=at < num_tokens)
        return
    seat = tl.load(seats + row)
    start = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - start
    computed = tl.load(num_computed + seat)
    mask = j < length
    seq_len = computed + length
    written = mask
    if LIMITED:
        limit = tl.load(limits + seat)
        over = (row < num_decodes) & (limit > 0) & (computed + 1 >= limit)
        seq_len -= over.to(tl.int32)
        written = mask & (over == 0)
    if tl.program_id(1) == 0:
        tl.store(seq_lens + row, seq_len)
    position = computed + j
    table = block_table + seat.to(tl.int64) * max_blocks
    block = tl.load(table + position // BLOCK_SIZE, mask=mask, other=0)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    if LIMITED:
        slot = tl.where(written, slot, -1)
    if row < num_decodes:
        token = tl.load(last_token + seat) + tl.zeros([TOKENS], tl.int32)
    else:
        token = tl.load(staged_ids + start - num_decodes + j, mask=mask, other=0)
    tl.store(input_ids + start + j, token, mask=mask)
    tl.store(positions + start + j, position, mask=mask)
    tl.store(slots + start + j, slot, mask=mask)
    tl.store(token_of_slot + slot, token, mask=written)


def gather(
    state: SeatState,
    out: StepBuffers,
    seats: torch.Tensor,
    query_start: torch.Tensor,
    staged_ids: torch.Tensor,
    num_decodes: int,
    max_query_len: int,
) -> None:
    grid = (len(seats) + 1, -(-max(max_query_len, 1) // _TOKENS))
    _gather[grid](
        state.last_token,
        state.num_computed,
        state.block_table,
        state.token_of_slot,
        seats,
        query_start,
        staged_ids,
        out.input_ids,
        out.positions,
        out.slots,
        out.seq_lens,
        state.last_token if state.limit is None else state.limit,
        len(seats),
        len(out.input_ids),
        num_decodes,
        state.block_table.shape[1],
        BLOCK_SIZE=state.block_size,
        TOKENS=_TOKENS,
        LIMITED=state.limit is not None,
    )


@triton.jit(do_not_specialize=["rows", "max_blocks"])
def _gather_decode(
    last_token,
    num_computed,
    block_table,
    token_of_slot,
    seats,
    input_ids,
    positions,
    slots,
    seq_lens,
    limits,
    rows,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LIMITED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    seat = tl.load(seats + row, mask=mask, other=0)
    position = tl.load(num_computed + seat, mask=mask, other=0)
    token = tl.load(last_token + seat, mask=mask, other=0)
    block = tl.load(block_table + seat.to(tl.int64) * max_blocks + position // BLOCK_SIZE, mask=mask, other=0)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    seq_len = position + 1
    written = mask
    if LIMITED:
        limit = tl.load(limits + seat, mask=mask, other=0)
        over = (limit > 0) & (seq_len >= limit)
        slot = tl.where(over, -1, slot)
        seq_len = tl.where(over, position, seq_len)
        written = mask & (slot >= 0)
    tl.store(input_ids + row, token, mask=mask)
    tl.store(positions + row, position, mask=mask)
    tl.store(slots + row, slot, mask=mask)
    tl.store(seq_lens + row, seq_len, mask=mask)
    tl.store(token_of_slot + slot, token, mask=written)


def gather_decode(state: SeatState, out: StepBuffers, seats: torch.Tensor) -> None:
    rows = len(seats)
    _gather_decode[(-(-rows // _ROWS),)](
        state.last_token,
        state.num_computed,
        state.block_table,
        state.token_of_slot,
        seats,
        out.input_ids,
        out.positions,
        out.slots,
        out.seq_lens,
        state.last_token if state.limit is None else state.limit,
        rows,
        state.block_table.shape[1],
        BLOCK_SIZE=state.block_size,
        ROWS=_ROWS,
        LIMITED=state.limit is not None,
    )


@triton.jit(
    do_not_specialize=["rows", "num_tokens", "max_blocks"], do_not_specialize_on_alignment=["seats", "query_start"]
)
def _find_slots(
    block_table,
    seats,
    query_start,
    positions,
    known,
    slots,
    rows,
    num_tokens,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    EACH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    j = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    if EACH > 0:
        at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        mask = at < num_tokens
        seat = tl.load(seats + at // EACH, mask=mask, other=0)
    else:
        row = tl.program_id(0)
        start = tl.load(query_start + row)
        if row == rows:  # behind the last one: padding
            tl.store(slots + start + j, tl.zeros([TOKENS], tl.int32) - 1, mask=start + j < num_tokens)
            return
        at = start + j
        mask = at < tl.load(query_start + row + 1)
        seat = tl.load(seats + row) + tl.zeros([TOKENS], tl.int32)
    position = tl.load(positions + at, mask=mask, other=0)
    block = tl.load(block_table + seat.to(tl.int64) * max_blocks + position // BLOCK_SIZE, mask=mask, other=0)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slots + at, tl.where(tl.load(known + at, mask=mask, other=-1) < 0, -1, slot), mask=mask)


def find_slots(
    table: GroupTable,
    seats: torch.Tensor,
    query_start: torch.Tensor | None,
    positions: torch.Tensor,
    known: torch.Tensor,
    slots: torch.Tensor,
    max_query_len: int,
) -> None:
    rows = len(seats)
    if query_start is None:
        tokens, grid = _ROWS, (-(-len(slots) // _ROWS), 1)
    else:
        tokens, grid = _TOKENS, (rows + 1, -(-max(max_query_len, 1) // _TOKENS))
    _find_slots[grid](
        table.blocks,
        seats,
        seats if query_start is None else query_start,
        positions,
        known,
        slots,
        rows,
        len(slots),
        table.blocks.shape[1],
        BLOCK_SIZE=table.block_size,
        EACH=len(slots) // rows if query_start is None else 0,
        TOKENS=tokens,
    )


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["seats", "sampled", "sample_index"])
def _commit(
    last_token,
    num_computed,
    out_tokens,
    seats,
    seq_lens,
    sampled,
    sample_index,
    rows,
    EVERY_ROW: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    seat = tl.load(seats + row, mask=mask, other=0)
    place = row
    if not EVERY_ROW:
        place = tl.load(sample_index + row, mask=mask, other=-1)
    samples = mask & (place >= 0)
    token = tl.load(sampled + place, mask=samples, other=-1)
    tl.store(out_tokens + row, token, mask=mask)
    real = mask & (seat > 0)
    tl.store(num_computed + seat, tl.load(seq_lens + row, mask=mask, other=0), mask=real)
    tl.store(last_token + seat, token, mask=real & samples)


def commit(
    state: SeatState,
    out_tokens: torch.Tensor,
    seats: torch.Tensor,
    seq_lens: torch.Tensor,
    sampled: torch.Tensor,
    sample_index: torch.Tensor | None,
) -> None:
    rows = len(seats)
    _commit[(-(-rows // _ROWS),)](
        state.last_token,
        state.num_computed,
        out_tokens,
        seats,
        seq_lens,
        sampled,
        sampled if sample_index is None else sample_index,
        rows,
        EVERY_ROW=sample_index is None,
        ROWS=_ROWS,
    )
