"""Settling a step whose decode rows had drafts: each brings as many tokens as turned out right.

What a row was planned to reach at most is put right here. Tokens behind an end of the request are dropped: their KV was
computed, and is never offered to the prefix cache.
"""

from __future__ import annotations

import numpy as np

from quire.scheduling.drafting import Drafting
from quire.scheduling.request import Request
from quire.scheduling.state import PlannedStep, State
from quire.scheduling.telling import end, end_failed, tell
from quire.types.output import EngineOutput, TokenLogprobs
from quire.types.result import StepResult

Lines = dict[int, list[TokenLogprobs]]  # by plan row


def settle_drafted(
    state: State, step: PlannedStep, result: StepResult, lines: Lines, failures: dict[int, str]
) -> tuple[list[str], list[int], list[int], list[EngineOutput]]:
    """The requests with just tokens to tell, their tokens one behind the other, how many each, and other news."""
    rows, seats = step.decodes, state.seats
    sampled, counts = result.tokens.tolist(), result.counts.tolist()
    _learn_lengths(state, step, result.counts)
    streamed = set(range(len(rows)) if rows.streamed is None else rows.streamed)
    ids: list[str] = []
    tokens: list[int] = []
    told: list[int] = []
    outputs: list[EngineOutput] = []
    columns = rows.requests, rows.seats.tolist(), seats.due.take(rows.seats).tolist()
    for row, (request, seat, due) in enumerate(zip(*columns, strict=True)):
        if request.is_finished:
            continue
        has_seat = seat not in step.left
        if not has_seat:
            request.num_unseen -= 1
        if row in failures:
            outputs.append(end_failed(state, request, failures[row]))
            continue
        new = sampled[row][: counts[row]]
        count, ends = _append(state, request, new)
        state.totals.generation_tokens += count
        if has_seat:
            seats.num_seen[seat] = len(request.tokens)
        if has_seat and not ends and row not in lines and len(request.tokens) < due:
            if row in streamed:
                ids.append(request.id)
                tokens += new
                told.append(count)
        elif (output := tell(state, request, lines.get(row), count)) is not None:
            outputs.append(output)
    if len(ids) == len(rows.streamed_ids):
        ids = rows.streamed_ids  # the very same list as long as the batch stays
    return ids, tokens, told, outputs


def _append(state: State, request: Request, new: list[int]) -> tuple[int, bool]:
    """Take tokens in up to the one that ends the request: how many, and whether it ends."""
    # The stop tokens of the seated are known together.
    is_plain = request.seat and not request.is_followed and state.seats.stops.keys().isdisjoint(new)
    if is_plain and len(request.tokens) + len(new) < request.limit:
        request.tokens.extend(new)
        return len(new), False
    for count, token in enumerate(new, 1):
        request.tokens.append(token)
        request.advance()
        if end(request)[0] is not None:
            return count, True
    return len(new), False


def _learn_lengths(state: State, step: PlannedStep, counts: np.ndarray) -> None:
    """Rows that still have their seat: how far they have really come."""
    rows, seats = step.decodes, state.seats
    here = ~np.isin(rows.seats, [*step.left]) if step.left else np.ones(len(rows), np.bool_)
    seated, counts = rows.seats[here], counts[: len(rows)][here]
    planned = 1 + np.int32(step.plan.num_drafts) * seats.may_draft.take(seated)
    seats.most[seated] -= planned - counts
    seats.least[seated] += counts - 1
    limit = seats.limit.take(seated)
    seats.num_computed[seated] = np.minimum(seats.most.take(seated), limit - 1)
    drained = seated[(seats.least.take(seated) + 1 >= limit) & seats.decoding.take(seated)]
    if len(drained):
        seats.stop_decoding(drained)


def learn(state: State, drafting: Drafting, step: PlannedStep, result: StepResult) -> None:
    """What became of the drafts, or would have, of the rows that still have their seat."""
    rows = step.decodes
    if result.drafted is None or result.matched is None or not len(rows):
        return
    here = state.seats.may_draft.take(rows.seats) & (result.counts[: len(rows)] > 0)
    if step.left:
        here &= ~np.isin(rows.seats, [*step.left])
    drafted, matched = (column[: len(rows)][here] for column in (result.drafted, result.matched))
    drafting.learn(rows.seats[here], drafted, matched, verified=step.plan.num_drafts > 0)
