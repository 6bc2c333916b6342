"""The life of one request: what the core saw of it, its tokens, and what its answer was made of."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from quire.foundation.aside import aside
from quire.server.http.trail import Trail
from quire.types.reply import CallArguments, CallStart, Content, Piece, Reasoning

if TYPE_CHECKING:
    from quire.frontend.async_engine import AsyncLLM
    from quire.frontend.outputs import RequestState
    from quire.frontend.tokenization.tokenizer import Tokenizer

MAX_TOKENS = 4096  # shown of a prompt or an answer
MANY = 256  # tokens whose text is made on a thread


async def life_of(engine: AsyncLLM, request_id: str, trail: Trail | None, *, shows_text: bool) -> dict[str, Any] | None:
    """None: it is not known here (any more). shows_text: to who asks."""
    state = engine.find(request_id)
    events = await engine.life(request_id)
    if state is None and not events:
        return None
    found: dict[str, Any] = {"id": request_id, "now": time.time(), "events": events, "shows_text": shows_text}
    if trail is not None:
        found["http"] = {**trail.line(), "model": trail.model, "began": trail.began, "error": trail.error}
    if state is not None:
        times = state.metrics
        found |= {
            "prompt_tokens": state.num_prompt_tokens,
            "cached_tokens": state.num_cached_tokens,
            "preemptions": times.num_preemptions,
            "arrival": times.arrival_time,
            "first_scheduled": times.first_scheduled_time,
            "first_token": times.first_token_time,
            "finished": times.finished_time,
            "error": state.error,
        }
        tokenizer = engine.get_tokenizer()
        size = sum(min(len(answer.token_ids), MAX_TOKENS) for answer in state.answers)
        size += min(state.num_prompt_tokens, MAX_TOKENS)
        found |= await aside(lambda: _contents(state, tokenizer, trail, shows_text), size, MANY)
    return found


def _contents(
    state: RequestState, tokenizer: Tokenizer | None, trail: Trail | None, shows_text: bool
) -> dict[str, Any]:
    answers = []
    for answer in state.answers:
        ids = list(answer.token_ids)  # it may grow meanwhile
        logprobs = [entry[next(iter(entry))].logprob for entry in answer.logprobs[: len(ids)]]
        shown: dict[str, Any] = {
            "num_tokens": len(ids),
            "finish_reason": answer.finish_reason,
            "logprobs": logprobs[:MAX_TOKENS] or None,
        }
        if shows_text and tokenizer is not None:
            shown["tokens"] = [tokenizer.token_text(token) for token in ids[:MAX_TOKENS]]
            shown["parts"] = _parts(trail, tokenizer, ids)
        answers.append(shown)
    found: dict[str, Any] = {"answers": answers}
    if shows_text and tokenizer is not None:
        prompt = state.prompt_token_ids[:MAX_TOKENS]
        found["prompt"] = [tokenizer.token_text(token) for token in prompt]
    return found


def _parts(trail: Trail | None, tokenizer: Tokenizer, ids: list[int]) -> list[dict[str, str]] | None:
    """Reasoning, content and calls of an answer in a conversation; None: it is plain text."""
    if trail is None or trail.plan is None:
        return None
    parser = trail.plan.parser()
    pieces = parser.feed(tokenizer.decode(ids, skip_special_tokens=not trail.plan.calls))
    parts: list[dict[str, str]] = []
    for piece in [*pieces, *parser.finish(is_cut=True)]:
        _add(parts, piece)
    return parts


def _add(parts: list[dict[str, str]], piece: Piece) -> None:
    match piece:
        case CallStart(_, _, name):
            parts.append({"kind": "call", "name": name, "text": ""})
        case CallArguments(_, text):
            parts[-1]["text"] += text
        case Reasoning(text) | Content(text):
            kind = "reasoning" if isinstance(piece, Reasoning) else "content"
            if parts and parts[-1]["kind"] == kind:
                parts[-1]["text"] += text
            else:
                parts.append({"kind": kind, "text": text})
