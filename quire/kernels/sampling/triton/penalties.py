"""Triton twin of `kernels.sampling.sampling.penalize`: count the history's tokens into scratch, then walk it again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.sampling.state import Column, History, Scratch
from quire.kernels.sampling.triton.draw import load_float
from quire.kernels.triton.launch import cdiv

_WIDTH = tl.constexpr(len(Column))
_NUM_PROMPT = tl.constexpr(int(Column.NUM_PROMPT))
_REPETITION = tl.constexpr(int(Column.REPETITION))
_PRESENCE = tl.constexpr(int(Column.PRESENCE))
_FREQUENCY = tl.constexpr(int(Column.FREQUENCY))
_IN_PROMPT = tl.constexpr(1 << 30)  # beside the count of a token in the output
_TOKENS = 512  # of the history, that a program looks at together
_PROGRAMS = 8  # a row: short histories leave most of them idle
_ANYWHERE = ["seats", "lengths"]


@triton.jit
def _load_penalties(column):
    repetition = load_float(column + _REPETITION)
    presence = load_float(column + _PRESENCE)
    frequency = load_float(column + _FREQUENCY)
    return repetition, presence, frequency, (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)


@triton.jit
def _history_tile(token_of_slot, table, position, length, vocab, BLOCK_SIZE: tl.constexpr):
    """The tokens at `position` and which of them are there (and in the vocabulary)."""
    live = position < length
    block = tl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    token = tl.load(token_of_slot + block * BLOCK_SIZE + position % BLOCK_SIZE, mask=live, other=0)
    return token, live & (token >= 0) & (token < vocab)


@triton.jit(do_not_specialize=["max_blocks"], do_not_specialize_on_alignment=_ANYWHERE)
def _count(
    columns,
    seats,
    lengths,
    token_of_slot,
    block_table,
    counts,
    max_blocks,
    vocab,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    seat = tl.load(seats + row).to(tl.int64)
    column = columns + seat * _WIDTH
    _, _, _, wanted = _load_penalties(column)
    if (seat == 0) | (not wanted):
        return
    length = tl.load(lengths + row)
    num_prompt = tl.load(column + _NUM_PROMPT)
    table = block_table + seat * max_blocks
    for start in range(tl.program_id(0) * TOKENS, length, tl.num_programs(0) * TOKENS):
        position = start + tl.arange(0, TOKENS)
        token, live = _history_tile(token_of_slot, table, position, length, vocab, BLOCK_SIZE)
        place = counts + row * vocab + token
        tl.atomic_or(place, _IN_PROMPT, mask=live & (position < num_prompt), sem="relaxed")
        tl.atomic_add(place, 1, mask=live & (position >= num_prompt), sem="relaxed")


@triton.jit(do_not_specialize=["max_blocks"], do_not_specialize_on_alignment=_ANYWHERE)
def _apply(
    logits,
    columns,
    seats,
    lengths,
    token_of_slot,
    block_table,
    counts,
    stride,
    max_blocks,
    vocab,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    seat = tl.load(seats + row).to(tl.int64)
    repetition, presence, frequency, wanted = _load_penalties(columns + seat * _WIDTH)
    if (seat == 0) | (not wanted):
        return
    length = tl.load(lengths + row)
    table = block_table + seat * max_blocks
    for start in range(tl.program_id(0) * TOKENS, length, tl.num_programs(0) * TOKENS):
        position = start + tl.arange(0, TOKENS)
        token, live = _history_tile(token_of_slot, table, position, length, vocab, BLOCK_SIZE)
        # Of all places that hold a token, the one that takes its count away edits the logit.
        count = tl.atomic_xchg(counts + row * vocab + token, 0, mask=live, sem="relaxed")
        first = live & (count != 0)
        count = count & (_IN_PROMPT - 1)
        x = tl.load(logits + row * stride + token, mask=first, other=0.0)
        x = tl.where(x > 0, x / repetition, x * repetition)
        x = x - tl.where(count > 0, presence + frequency * count.to(tl.float32), 0.0)
        tl.store(logits + row * stride + token, x, mask=first)


def penalize(
    logits: torch.Tensor,
    columns: torch.Tensor,
    seats: torch.Tensor,
    lengths: torch.Tensor,
    history: History,
    scratch: Scratch,
) -> None:
    rows, vocab = logits.shape
    grid = (min(cdiv(history.max_len, _TOKENS), _PROGRAMS), rows)
    paged = (history.token_of_slot, history.block_table, scratch.counts)
    max_blocks = history.block_table.shape[1]
    shape = {"BLOCK_SIZE": history.block_size, "TOKENS": _TOKENS}
    _count[grid](columns, seats, lengths, *paged, max_blocks, vocab, **shape)
    _apply[grid](logits, columns, seats, lengths, *paged, logits.stride(0), max_blocks, vocab, **shape)
