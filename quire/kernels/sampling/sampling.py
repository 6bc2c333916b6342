"""From logits to tokens: greedy or by inverse CDF with one uniform a row.

The uniform is a hash of the request's key and the number of tokens it has (`uniform`), so a seed gives the same
tokens at any batch size, row, load or preemption. The CDF runs over token ids in rising order, chunk by chunk.
NaN counts as -inf and is never sampled; a row without any finite logit gives token 0, and so does seat 0.

`filtered` rows keep the tokens at or above one cut:
  min-p   logit >= maximum + temperature * log(min_p)
  top-k   logit >= the k-th largest; all tokens tied with it stay
  top-p   of what is left, renormalised: a token stays while the tokens above it hold less than p. Ties stay
          together, and the best token always stays.
"""

from __future__ import annotations

import math

import torch

from quire.kernels.dispatch import on_cpu, on_cuda
from quire.kernels.sampling import plain
from quire.kernels.sampling.draws import LARGEST, clean, floats, pick, seed_key, uniform
from quire.kernels.sampling.state import CHUNK, Column, History, Scratch

__all__ = ["Column", "History", "Scratch", "penalize", "sample", "seed_key", "uniform"]

_CPU_SLICE_BYTES = 8 * 1024**2


def sample(
    logits: torch.Tensor,
    columns: torch.Tensor,
    seats: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scratch: Scratch | None,
    *,
    filtered: bool,
) -> None:
    """Write one token a row to `out`.

    logits: float32 [rows, vocab]; columns: int32 [seats, len(Column)]; seats, lengths, out: int32 [rows].
    lengths: tokens the request has before the one sampled. scratch: needed by the GPU's kernels, at least `rows` long.
    Without `filtered`, top-k, top-p and min-p of the columns are not looked at. Fit for a CUDA graph.
    """
    if on_cuda(logits):
        from quire.kernels.sampling.triton import sampling

        assert scratch is not None
        sampling.sample(logits, columns, seats, lengths, out, scratch, filtered=filtered)
        return
    if not on_cpu(logits):
        plain.sample(logits, columns, seats, lengths, out, filtered=filtered)
        return
    rows = columns[seats.long()]
    drawing = floats(rows, Column.INV_TEMPERATURE) > 0
    if not drawing.any():
        out.copy_(_argmax(logits))
    else:
        out[~drawing] = _argmax(logits[~drawing]).int()
        for part in torch.split(drawing.nonzero().squeeze(1), max(1, _CPU_SLICE_BYTES // (4 * logits.shape[1]))):
            out[part] = _draw_rows(logits[part], rows[part], lengths[part], filtered=filtered).int()
    out.masked_fill_(seats == 0, 0)


def penalize(
    logits: torch.Tensor,
    columns: torch.Tensor,
    seats: torch.Tensor,
    lengths: torch.Tensor,
    history: History,
    scratch: Scratch | None,
) -> None:
    """Repetition, presence and frequency penalties, in place; rows without any are left alone.

    repetition r over prompt and output: logit / r if positive, else logit * r (Keskar et al., 2019, section 4.1);
    presence and frequency over the output: logit - presence * [count > 0] - frequency * count (OpenAI's definition).
    logits: [rows, vocab] with at most `len(scratch.counts)` rows on a GPU; seats, lengths: int32 [rows].
    """
    if on_cuda(logits):
        from quire.kernels.sampling.triton import penalties

        assert scratch is not None
        penalties.penalize(logits, columns, seats, lengths, history, scratch)
        return
    if not on_cpu(logits):
        plain.penalize(logits, columns, seats, lengths, history)
        return
    rows = columns[seats.long()]
    prompt = rows[:, Column.NUM_PROMPT].tolist()
    penalty = [floats(rows, column) for column in (Column.REPETITION, Column.PRESENCE, Column.FREQUENCY)]
    for row, (repetition, presence, frequency) in enumerate(torch.stack(penalty, 1).tolist()):
        if seats[row] == 0 or (repetition == 1 and presence == 0 and frequency == 0):
            continue
        tokens = history.at(seats[row : row + 1].long(), torch.arange(int(lengths[row])).unsqueeze(0))[0].long()
        seen = torch.unique(tokens)
        old = logits[row, seen]
        logits[row, seen] = torch.where(old > 0, old / repetition, old * repetition)
        seen, counts = torch.unique(tokens[prompt[row] :], return_counts=True)
        logits[row, seen] -= presence + frequency * counts


# -- CPU --------------------------------------------------------------------------------------------------------


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    best = logits.argmax(-1)  # the first of equals
    broken = logits.gather(1, best.unsqueeze(1)).squeeze(1).isnan()
    if broken.any():  # torch takes NaN for the largest
        best[broken] = clean(logits[broken]).argmax(-1)
    return best


def _draw_rows(logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, *, filtered: bool) -> torch.Tensor:
    """Inverse CDF: int64 [n] tokens. logits: [n, vocab]; rows: [n, len(Column)], none greedy; lengths: [n]."""
    n, vocab = logits.shape
    top = logits.amax(-1, keepdim=True)
    if not torch.isfinite(top).all():
        logits = clean(logits)
        top = logits.amax(-1, keepdim=True).clamp(min=-LARGEST)
    width = min(vocab, CHUNK)
    chunks = -(-vocab // width)
    weights = torch.zeros(n, chunks * width)
    inside = weights[:, :vocab]
    torch.sub(logits, top, out=inside)
    inside.mul_(floats(rows, Column.INV_TEMPERATURE).unsqueeze(1)).exp_()
    if filtered:
        for i in range(n):
            cut = _cut(logits[i], inside[i], rows[i])
            if cut > -math.inf:
                inside[i].masked_fill_(logits[i] < cut, 0)
    weights = weights.view(n, chunks, width)
    sums = weights.sum(-1)
    u = uniform(rows[:, Column.KEY_LOW], rows[:, Column.KEY_HIGH], lengths)
    chunk, rest = pick(sums, u * sums.sum(-1))
    token, _ = pick(weights[torch.arange(n), chunk], rest)
    return chunk * width + token


def _cut(logits: torch.Tensor, weights: torch.Tensor, row: torch.Tensor) -> float:
    """The logit below which a token is cut. logits, weights: [vocab], weights = exp((logit - max) / temperature)."""
    row = row.unsqueeze(0)
    top_k, top_p = int(row[0, Column.TOP_K]), floats(row, Column.TOP_P).item()
    top = logits.max().item()
    cut = top + floats(row, Column.MIN_P_CUT).item()
    if 0 < top_k < len(logits):
        cut = max(cut, logits.topk(top_k).values[-1].item())
    if top_p >= 1 or top == -math.inf:
        return cut
    if cut == -math.inf:
        # Tokens this far below the best hold less than 1 - p together: sorting the others is enough.
        total = weights.double().sum().item()
        kept = weights >= (1 - top_p) * total / len(weights)
    else:
        kept = logits >= cut
        total = weights[kept].double().sum().item()
    ordered, order = logits[kept].sort(descending=True)
    running = weights[kept][order].double().cumsum(0)
    reached = int((running < top_p * total).sum())  # tokens before the one that reaches p
    return max(cut, ordered[min(reached, len(ordered) - 1)].item())
