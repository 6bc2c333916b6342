"""Triton twins of `kernels/drafts.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import cdiv

if TYPE_CHECKING:
    from quire.kernels.draft_state import DraftBuffers, DraftState
    from quire.kernels.step.state import SeatState, StepBuffers

_ROWS = 128  # rows, or tokens of them, a program
_TOKENS = 1024  # of a text that a program looks at together
_PROGRAMS = 16  # a text
_PLACES = 1 << 26  # that a key tells apart; above them stands the length of the match


@triton.jit(do_not_specialize=["rows", "max_blocks"])
def _gather_drafted(
    last_token, num_computed, limits, block_table, token_of_slot, draft_tokens, draft_counts, may_draft, seats,
    input_ids, positions, slots, seq_lens, token_seats, lengths, first_lens, used, rows, max_blocks,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row, place = token // WIDTH, token % WIDTH
    mask = row < rows
    seat = tl.load(seats + row, mask=mask, other=0)
    computed = tl.load(num_computed + seat, mask=mask, other=0)
    limit = tl.load(limits + seat, mask=mask, other=0)
    over = (limit > 0) & (computed + 1 >= limit)
    drafted = tl.load(draft_counts + seat, mask=mask, other=0) * tl.load(may_draft + seat, mask=mask, other=0)
    count = tl.maximum(tl.minimum(drafted, limit - computed - 2), 0)
    there = mask & (place <= count) & (over == 0)
    offset = tl.minimum(place, count)
    position = computed + offset
    block = tl.load(block_table + seat.to(tl.int64) * max_blocks + position // BLOCK_SIZE, mask=there, other=0)
    slot = tl.where(there, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    last = tl.load(last_token + seat, mask=there & (place == 0), other=0)
    draft = tl.load(draft_tokens + seat * (WIDTH - 1) + place - 1, mask=there & (place > 0), other=0)
    own = tl.where(place == 0, last, draft)
    first = computed + tl.where(over, 0, 1)
    tl.store(input_ids + token, own, mask=mask)
    tl.store(positions + token, position, mask=mask)
    tl.store(slots + token, slot, mask=mask)
    tl.store(token_seats + token, seat, mask=mask)
    tl.store(lengths + token, first + offset, mask=mask)
    tl.store(token_of_slot + slot, own, mask=there)
    is_first = mask & (place == 0)
    tl.store(seq_lens + row, first + count, mask=is_first)
    tl.store(first_lens + row, first, mask=is_first)
    tl.store(used + row, tl.where(over, -1, count), mask=is_first)


def gather_drafted(
    state: SeatState, drafts: DraftState, out: StepBuffers, more: DraftBuffers, seats: torch.Tensor
) -> None:
    rows, width = len(seats), drafts.width
    _gather_drafted[(-(-rows * width // _ROWS),)](
        state.last_token, state.num_computed, state.limit, state.block_table, state.token_of_slot, drafts.tokens,
        drafts.count, drafts.may_draft, seats, out.input_ids, out.positions, out.slots, out.seq_lens, more.seats,
        more.lengths, more.first_lens, more.used, rows, state.block_table.shape[1], BLOCK_SIZE=state.block_size,
        WIDTH=width, TOKENS=_ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _commit_drafted(
    last_token, num_computed, outcome, first_lens, used, seats, input_ids, sampled, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    seat = tl.load(seats + row, mask=mask, other=0)
    drafted = tl.load(used + row, mask=mask, other=-1)
    right = mask
    matched = row * 0
    for place in tl.static_range(WIDTH - 1):
        token = tl.load(sampled + row * WIDTH + place, mask=mask, other=-1)
        draft = tl.load(input_ids + row * WIDTH + place + 1, mask=mask, other=-2)
        right = right & (place < drafted) & (token == draft)
        matched += right.to(tl.int32)
    count = tl.where(drafted < 0, 0, matched + 1)
    at = outcome + row * (WIDTH + 2)
    for place in tl.static_range(WIDTH):
        token = tl.load(sampled + row * WIDTH + place, mask=mask, other=-1)
        tl.store(at + place, tl.where(place < count, token, -1), mask=mask)
    tl.store(at + WIDTH, tl.maximum(drafted, 0), mask=mask)
    tl.store(at + WIDTH + 1, matched, mask=mask)
    live = mask & (seat > 0) & (count > 0)
    tl.store(num_computed + seat, tl.load(first_lens + row, mask=live, other=1) - 1 + count, mask=live)
    tl.store(last_token + seat, tl.load(sampled + row * WIDTH + matched, mask=live, other=0), mask=live)


def commit_drafted(
    state: SeatState,
    outcome: torch.Tensor,
    more: DraftBuffers,
    seats: torch.Tensor,
    input_ids: torch.Tensor,
    sampled: torch.Tensor,
) -> None:
    rows = len(seats)
    _commit_drafted[(-(-rows // _ROWS),)](
        state.last_token, state.num_computed, outcome, more.first_lens, more.used, seats, input_ids, sampled, rows,
        WIDTH=len(input_ids) // rows, ROWS=_ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "num_decodes"], do_not_specialize_on_alignment=["outcome", "seats", "tokens"])
def _probe(
    draft_tokens, draft_counts, may_draft, outcome, seats, tokens, rows, num_decodes,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    seat = tl.load(seats + row, mask=mask, other=0)
    token = tl.load(tokens + row, mask=mask, other=-1)
    decodes = mask & (row < num_decodes)
    drafted = tl.load(draft_counts + seat, mask=decodes, other=0) * tl.load(may_draft + seat, mask=decodes, other=0)
    draft = tl.load(draft_tokens + seat * (WIDTH - 1), mask=decodes, other=-2)
    compared = drafted > 0
    at = outcome + row * (WIDTH + 2)
    tl.store(at, token, mask=mask)
    tl.store(at + WIDTH, compared.to(tl.int32), mask=mask)
    tl.store(at + WIDTH + 1, (compared & (draft == token)).to(tl.int32), mask=mask)


def probe(
    drafts: DraftState, outcome: torch.Tensor, seats: torch.Tensor, tokens: torch.Tensor, num_decodes: int
) -> None:
    rows = len(seats)
    _probe[(-(-rows // _ROWS),)](
        drafts.tokens, drafts.count, drafts.may_draft, outcome, seats, tokens, rows, num_decodes, WIDTH=drafts.width,
        ROWS=_ROWS,
    )  # fmt: skip


@triton.jit
def _token_at(token_of_slot, table, position, last, computed, mask, BLOCK_SIZE: tl.constexpr):
    """Token `position` of a text of `computed` tokens and a last one; -1 outside of the mask."""
    inside = (position < computed) & mask
    block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0)
    token = tl.load(token_of_slot + block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside, other=-1)
    return tl.where((position == computed) & mask, last, token)


@triton.jit(do_not_specialize=["max_blocks", "longest", "shortest"], do_not_specialize_on_alignment=["seats", "keys"])
def _find_ngram(
    last_token, num_computed, block_table, token_of_slot, may_draft, seats, keys, max_blocks, longest, shortest,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    seat = tl.load(seats + row)
    computed = tl.load(num_computed + seat)
    if (seat == 0) | (tl.load(may_draft + seat) == 0) | (tl.program_id(0) * TOKENS >= computed):
        return
    last = tl.load(last_token + seat)
    table = block_table + seat.to(tl.int64) * max_blocks
    best = 0
    for start in range(tl.program_id(0) * TOKENS, computed, tl.num_programs(0) * TOKENS):
        position = start + tl.arange(0, TOKENS)
        equal = position < computed
        length = position * 0
        for back in range(tl.minimum(longest, computed)):
            # Where the rest of the tile is unlike, nothing is read.
            wanted = _token_at(token_of_slot, table, computed - back, last, computed, True, BLOCK_SIZE)
            equal = equal & (position >= back)
            equal = equal & (
                _token_at(token_of_slot, table, position - back, last, computed, equal, BLOCK_SIZE) == wanted
            )
            length += equal.to(tl.int32)
        best = tl.maximum(best, tl.max(tl.where(length >= shortest, length * PLACES + position, 0), 0))
    if best > 0:
        tl.atomic_max(keys + row, best, sem="relaxed")


@triton.jit(do_not_specialize=["max_blocks"], do_not_specialize_on_alignment=["seats", "keys"])
def _draft_ngram(
    last_token, num_computed, block_table, token_of_slot, draft_tokens, draft_counts, seats, keys, max_blocks,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    seat = tl.load(seats + row)
    key = tl.load(keys + row)
    tl.store(keys + row, 0)
    if seat == 0:
        return
    tl.store(draft_counts + seat, tl.where(key > 0, DRAFTS, 0))
    if key == 0:
        return
    computed, last = tl.load(num_computed + seat), tl.load(last_token + seat)
    found = key % PLACES
    place = tl.arange(0, BLOCK)
    source = found + 1 + place % (computed - found)
    table = block_table + seat.to(tl.int64) * max_blocks
    token = _token_at(token_of_slot, table, source, last, computed, place < DRAFTS, BLOCK_SIZE)
    tl.store(draft_tokens + seat * DRAFTS + place, token, mask=place < DRAFTS)


def propose_ngram(
    state: SeatState, drafts: DraftState, seats: torch.Tensor, keys: torch.Tensor, longest: int, shortest: int
) -> None:
    rows, max_blocks = len(seats), state.block_table.shape[1]
    text = (state.last_token, state.num_computed, state.block_table, state.token_of_slot)
    programs = min(cdiv(max_blocks * state.block_size, _TOKENS), _PROGRAMS)
    _find_ngram[(programs, rows)](
        *text, drafts.may_draft, seats, keys, max_blocks, longest, shortest, BLOCK_SIZE=state.block_size,
        TOKENS=_TOKENS, PLACES=_PLACES,
    )  # fmt: skip
    num_drafts = drafts.width - 1
    _draft_ngram[(rows,)](
        *text, drafts.tokens, drafts.count, seats, keys, max_blocks, DRAFTS=num_drafts,
        BLOCK=triton.next_power_of_2(num_drafts), BLOCK_SIZE=state.block_size, PLACES=_PLACES, num_warps=1,
    )  # fmt: skip
