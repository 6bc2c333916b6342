"""What is told of a request after a step, and whether it ends with its last token."""

from __future__ import annotations

from quire.scheduling.request import Request
from quire.scheduling.state import State
from quire.types.output import INVALID_REQUEST, PROCESSOR_FAILED, EngineOutput, TokenLogprobs

_REFUSED = (
    "no token was left: the grammar allows none that the other parameters of the request (allowed_token_ids, "
    "bad_words, min_tokens) leave, or became too costly to follow"
)


def tell(state: State, request: Request, lines: list[TokenLogprobs] | None, count: int = 1) -> EngineOutput | None:
    """The output for a request whose last `count` tokens were just appended; None if it is told later. Finishes who
    ends."""
    num_tokens = len(request.tokens)
    reason, stop = end(request)
    first = num_tokens == request.num_prompt + 1
    if first:
        state.totals.prompt_tokens += request.num_prompt
    if reason is None and request.final_only and not request.is_first and num_tokens < request.due:
        return None
    if reason is not None:
        state.finish(request)
    reported = request.num_reported if request.final_only else num_tokens - count
    request.num_reported = num_tokens
    if request.final_only and request.seat:
        state.seats.due[request.seat] = request.due
    return EngineOutput(
        request_id=request.id,
        token_ids=request.tokens[reported:].tolist(),
        logprobs=lines[:count] if lines else None,
        prompt_logprobs=request.prompt_logprobs or None if first else None,
        finish_reason=reason,
        stop_reason=stop,
        lacks_stop_token=reason == "stop" and request.tokens[-1] not in request.stops,
        error=_REFUSED if reason == "error" else None,
        num_cached_tokens=request.num_cached if first else 0,
        queued=seconds_queued(request) if first else 0.0,
        num_preemptions=request.num_preemptions if reason is not None else 0,
        life=request.life if reason is not None and request.spec.trace is not None else None,
    )


def end_failed(state: State, request: Request, error: str) -> EngineOutput:
    """A logits processor raised for it: what it sampled means nothing."""
    state.finish(request)
    reported = request.num_reported if request.final_only else len(request.tokens)
    return EngineOutput(
        request_id=request.id,
        token_ids=request.tokens[reported:].tolist(),
        finish_reason="error",
        stop_reason=PROCESSOR_FAILED,
        error=error,
    )


def seconds_queued(request: Request) -> float:
    return max(0.0, request.first_scheduled - request.spec.arrival) if request.spec.arrival else 0.0


def end(request: Request) -> tuple[str | None, int | str | None]:
    """(finish_reason, stop_reason) after the last token, (None, None) to go on."""
    token, spec, constraint = request.tokens[-1], request.spec, request.constraint
    if constraint is not None and constraint.is_refused:
        return "error", INVALID_REQUEST
    stops = token in request.stops and len(request.tokens) - request.num_prompt >= spec.params.min_tokens
    if stops and not (constraint is not None and constraint.outlives_stop):
        return "stop", None if token == spec.eos_token_id else token
    if constraint is not None and constraint.is_done:
        return "stop", None
    if len(request.tokens) >= request.limit:
        return "length", None
    if request.repeats and len(request.tokens) - request.num_prompt >= spec.params.min_tokens:
        return "repetition", "repetition_detected"
    return None, None
