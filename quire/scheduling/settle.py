"""Settle: the outcome of a step meets the requests it was planned for.

Rows that merely decode are read in columns; only rows with something to tell (an end, log-probabilities, the first
token) are looked at one by one.
"""

from __future__ import annotations

import numpy as np

from quire.foundation.errors import QuireError
from quire.scheduling.logprobs import lines_by_row
from quire.scheduling.request import Request
from quire.scheduling.seats import DecodeRows
from quire.scheduling.settle_drafts import Lines, learn, settle_drafted
from quire.scheduling.state import Chunk, PlannedStep, State
from quire.scheduling.telling import end_failed, seconds_queued, tell
from quire.types.output import EngineOutput, EngineOutputs, TokenLogprobs
from quire.types.plan import StepPlan
from quire.types.result import PooledRows, StepResult


def settle(state: State, plan: StepPlan, result: StepResult) -> EngineOutputs:
    """Append the sampled tokens, finish who ends, and tell the news.

    Raises QuireError if `result` is not that of the oldest plan in flight, or not a possible one.
    """
    step = state.in_flight[0] if state.in_flight else None
    if step is None or step.plan.step != plan.step or result.step != plan.step:
        expected = "none" if step is None else step.plan.step
        raise QuireError(f"the result of step {result.step} came for plan {plan.step}; expected: {expected}")
    if result.error is not None:
        raise QuireError(f"step {plan.step} failed, and has nothing to settle: {result.error}")
    sampled = result.tokens[:, 0]
    is_whole = len(sampled) == plan.num_rows
    if not is_whole or ((sampled < 0).any() and _lacks_one(state, step, sampled)):
        raise QuireError(f"step {plan.step}: the result lacks a token of a row that samples")
    state.in_flight.popleft()
    tokens: list[int] = sampled.tolist()
    lines = lines_by_row(result.logprobs)
    failures = {failure.row: failure.message for failure in result.failures}
    counts = None
    if plan.num_drafts:
        ids, plain, counts, outputs = settle_drafted(state, step, result, lines, failures)
    else:
        ids, plain, outputs = _settle_decodes(state, step, sampled, tokens, lines, failures)
    if state.drafting is not None:
        learn(state, state.drafting, step, result)
    prompt_lines = lines_by_row(result.prompt_logprobs)
    vectors = _vectors_by_row(result.pooled)
    for row, chunk in enumerate(step.chunks, plan.num_decodes):
        if not chunk.request.is_finished and row in failures:
            outputs.append(end_failed(state, chunk.request, failures[row]))
        elif not chunk.request.is_finished:
            _keep_prompt_logprobs(chunk, prompt_lines.get(row, []))
            if chunk.request.spec.pooling is not None:
                if row in vectors:
                    _keep_vectors(chunk, vectors[row])
                if chunk.end == chunk.request.num_prompt:
                    outputs.append(_end_pooling(state, plan.step, chunk.request))
            elif chunk.samples:
                seat = int(plan.seats[row])
                output = _settle_one(state, step, seat, chunk.request, tokens[row], lines.get(row))
                if output is not None:
                    outputs.append(output)
    return EngineOutputs(ids=ids, tokens=plain, counts=counts, special=outputs)


def _lacks_one(state: State, step: PlannedStep, sampled: np.ndarray) -> bool:
    """Whether a row lacks its token, but for those that drafts filled up to their limit in the step before."""
    lacking = np.flatnonzero(step.plan.samples & (sampled < 0)).tolist()
    requests = step.decodes.requests
    full = state.drafting is not None and all(row < len(requests) and requests[row].is_finished for row in lacking)
    return bool(lacking) and not full


def _settle_decodes(
    state: State, step: PlannedStep, sampled: np.ndarray, tokens: list[int], lines: Lines, failures: dict[int, str]
) -> tuple[list[str], list[int], list[EngineOutput]]:
    """The requests with just a token to tell, their tokens, and the news of the others.

    sampled, tokens: of all rows of the step.
    """
    rows, seats = step.decodes, state.seats
    if not rows:
        return [], [], []
    if len(tokens) > len(rows):
        tokens = tokens[: len(rows)]  # those of catch-up rows follow
    for append, token in zip(rows.appends, tokens):  # noqa: B905 (hot)
        append(token)
    # From here on in columns, and only rows that still have the seat they had then.
    here, gone = None, set[int]()
    if step.left and (was := np.isin(rows.seats, [*step.left])).any():
        here, gone = np.flatnonzero(~was), set(np.flatnonzero(was).tolist())
    state.totals.generation_tokens += len(rows) - len(gone)
    seated = rows.seats if here is None else rows.seats[here]
    seen = seats.num_seen.take(seated) + 1
    seats.num_seen[seated] = seen
    # Rows with more to tell than their token.
    due = np.flatnonzero(seen >= seats.due.take(seated))
    special = set((due if here is None else here[due]).tolist()) | gone
    special.update(seats.rows_that_stop(sampled[: len(rows)]))
    special.update(row for row in lines if row < len(rows))
    special.update(row for row in failures if row < len(rows))
    special.update(row for row in rows.followed if rows.requests[row].advance())
    ids, plain = _plain(rows, tokens, special)
    outputs = []
    for row in sorted(special):
        request = rows.requests[row]
        if row in gone:
            if request.is_finished:
                continue
            request.num_unseen -= 1
            state.totals.generation_tokens += 1
        if row in failures:
            request.tokens.pop()
            outputs.append(end_failed(state, request, failures[row]))
            continue
        output = tell(state, request, lines.get(row))
        if output is not None:
            outputs.append(output)
    return ids, plain, outputs


def _plain(rows: DecodeRows, tokens: list[int], special: set[int]) -> tuple[list[str], list[int]]:
    """Ids and tokens of streamed rows but the special ones. As long as these stay the same, so does the list of ids."""
    streamed = rows.streamed
    if not special:
        return rows.streamed_ids, tokens if streamed is None else [tokens[row] for row in streamed]
    kept = [row for row in (range(len(rows)) if streamed is None else streamed) if row not in special]
    return [rows.ids[row] for row in kept], [tokens[row] for row in kept]


def _settle_one(
    state: State, step: PlannedStep, seat: int, request: Request, token: int, lines: list[TokenLogprobs] | None
) -> EngineOutput | None:
    """seat: that it had when the step was planned."""
    request.tokens.append(token)
    request.advance()
    state.totals.generation_tokens += 1
    if seat in step.left:
        request.num_unseen -= 1
    else:
        state.seats.num_seen[request.seat] = len(request.tokens)
    return tell(state, request, lines)


def _keep_vectors(chunk: Chunk, vectors: np.ndarray) -> None:
    """One of the whole prompt, or one a token; tokens computed for a second time have theirs already."""
    request, wanted = chunk.request, chunk.request.spec.pooling
    if wanted is not None and wanted.per_token:
        vectors = vectors[sum(map(len, request.pooled)) - chunk.start :]
    request.pooled.append(vectors)


def _end_pooling(state: State, step: int, request: Request) -> EngineOutput:
    if not request.pooled:
        raise QuireError(f"step {step}: the result lacks the vectors of a row that ends")
    state.totals.prompt_tokens += request.num_prompt
    state.finish(request)
    return EngineOutput(
        request_id=request.id,
        pooled=np.concatenate(request.pooled),
        finish_reason="stop",
        num_cached_tokens=request.num_cached,
        queued=seconds_queued(request),
        num_preemptions=request.num_preemptions,
        life=request.life if request.spec.trace is not None else None,
    )


def _vectors_by_row(pooled: list[PooledRows] | None) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for part in pooled or ():
        ends = part.counts.cumsum().tolist()
        rows, counts = part.rows.tolist(), part.counts.tolist()
        found |= {row: part.values[end - count : end] for row, count, end in zip(rows, counts, ends, strict=True)}
    return found


def _keep_prompt_logprobs(chunk: Chunk, lines: list[TokenLogprobs]) -> None:
    """Line j tells of position start + 1 + j; positions computed for a second time are known already."""
    request = chunk.request
    known = len(request.prompt_logprobs)
    if request.lacks_prompt_logprobs and known >= chunk.start:
        request.prompt_logprobs.extend(lines[known - chunk.start : request.num_prompt - 1 - chunk.start])
