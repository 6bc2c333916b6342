"""Sampling in plain torch on any device: whole batches at once, and nothing is read back.

Same contracts as `sampling` and `bitmask`, which say what is computed. Some rows at a time, so that what is needed on
the way stays small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from quire.kernels.sampling.draws import LARGEST, clean, floats, pick, uniform
from quire.kernels.sampling.state import CHUNK, Column, History

_AT_ONCE = 1 << 23  # numbers of logits, or tokens of histories
_NARROW = ("mps",)  # devices without 64-bit floats


def sample(
    logits: torch.Tensor,
    columns: torch.Tensor,
    seats: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    filtered: bool,
) -> None:
    rows = columns[seats.long()]
    for part in _parts(*logits.shape):
        found = _sample(logits[part], rows[part], lengths[part], filtered=filtered)
        out[part] = found.masked_fill(seats[part] == 0, 0).int()


def _sample(logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, *, filtered: bool) -> torch.Tensor:
    """int64 [n]. logits: [n, vocab]; rows: [n, len(Column)]; lengths: [n]."""
    n, vocab = logits.shape
    logits = clean(logits)
    sharpness = floats(rows, Column.INV_TEMPERATURE)
    top = logits.amax(-1, keepdim=True).clamp(min=-LARGEST)
    width = min(vocab, CHUNK)
    chunks = -(-vocab // width)
    weights = logits.new_zeros(n, chunks * width)
    inside = weights[:, :vocab]
    torch.sub(logits, top, out=inside)
    inside.mul_(sharpness.unsqueeze(1)).exp_()
    if filtered:
        inside.masked_fill_(logits < _cuts(logits, top, rows), 0)
    weights = weights.view(n, chunks, width)
    sums = weights.sum(-1)
    u = uniform(rows[:, Column.KEY_LOW], rows[:, Column.KEY_HIGH], lengths)
    chunk, rest = pick(sums, u * sums.sum(-1))
    token, _ = pick(weights.gather(1, chunk.view(n, 1, 1).expand(n, 1, width))[:, 0], rest)
    return torch.where(sharpness > 0, chunk * width + token, logits.argmax(-1))


def _cuts(logits: torch.Tensor, top: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The logits below which tokens are cut, [n, 1]; see `sampling`."""
    vocab, wide = logits.shape[1], torch.float32 if logits.device.type in _NARROW else torch.float64
    ordered = logits.sort(-1, descending=True).values
    cut = top + floats(rows, Column.MIN_P_CUT).unsqueeze(1)
    top_k, top_p = rows[:, Column.TOP_K].long().unsqueeze(1), floats(rows, Column.TOP_P).unsqueeze(1)
    kth = ordered.gather(1, (top_k - 1).clamp(0, vocab - 1))
    cut = torch.where((top_k > 0) & (top_k < vocab), torch.maximum(cut, kth), cut)
    kept = ordered >= cut
    weights = ((ordered - top) * floats(rows, Column.INV_TEMPERATURE).unsqueeze(1)).exp().masked_fill_(~kept, 0)
    running = weights.to(wide).cumsum(-1)
    reached = (running < top_p * running[:, -1:]).sum(-1, keepdim=True)  # tokens before the one that reaches p
    last = torch.minimum(reached, kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
    nucleus = torch.maximum(cut, ordered.gather(1, last))
    return torch.where((top_p < 1) & (ordered[:, :1] > -math.inf), nucleus, cut)


def penalize(
    logits: torch.Tensor, columns: torch.Tensor, seats: torch.Tensor, lengths: torch.Tensor, history: History
) -> None:
    rows, index = columns[seats.long()], seats.long()
    for part in _parts(len(logits), max(logits.shape[1], history.max_len)):
        _penalize(logits[part], rows[part], index[part], lengths[part].unsqueeze(1), history)


def _penalize(
    logits: torch.Tensor, rows: torch.Tensor, seats: torch.Tensor, lengths: torch.Tensor, history: History
) -> None:
    position = torch.arange(history.max_len, device=logits.device)
    # Those behind a text count for none: they go to a column of their own.
    is_there = position < lengths
    tokens = history.at(seats, position.expand(len(seats), -1)).long()
    is_output = is_there & (position >= rows[:, Column.NUM_PROMPT].unsqueeze(1))
    count, output = (_count(tokens, which, logits.shape[1]) for which in (is_there, is_output))
    is_real = (seats > 0).unsqueeze(1)
    factor = torch.where(is_real, floats(rows, Column.REPETITION).unsqueeze(1), 1.0)
    factor = torch.where(count > 0, factor, 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    presence, frequency = (floats(rows, column).unsqueeze(1) for column in (Column.PRESENCE, Column.FREQUENCY))
    logits -= torch.where(is_real & (output > 0), presence + frequency * output, 0.0)


def _count(tokens: torch.Tensor, which: torch.Tensor, vocab: int) -> torch.Tensor:
    """How often each token of the vocabulary is among those, int32 [n, vocab]."""
    found = torch.zeros(len(tokens), vocab, dtype=torch.int32, device=tokens.device)
    known = which & (tokens >= 0) & (tokens < vocab)
    return found.scatter_add_(1, tokens.clamp(0, vocab - 1), known.int())


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    vocab, bit = logits.shape[1], torch.arange(32, dtype=torch.int32, device=logits.device)
    for part in _parts(len(rows), vocab):
        index = rows[part].long()
        forbidden = (bits[part].unsqueeze(-1) >> bit & 1 == 0).flatten(1)[:, :vocab]
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(forbidden, -math.inf))


def _parts(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _AT_ONCE // width)
    return (slice(begin, begin + step) for begin in range(0, rows, step))
