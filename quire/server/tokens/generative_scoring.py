"""POST /generative_scoring: how likely a model goes on with one of some labels ("Yes", "No"), item by item."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.foundation.errors import ContextLengthError, InputError
from quire.server.generate import generation
from quire.server.generate.generation import PromptIds
from quire.server.generate.params import field_names
from quire.server.http.body import openapi_body, read_body
from quire.server.http.limits import MAX_PROMPTS
from quire.server.http.long_body import Prepared
from quire.server.http.sse import JsonReply
from quire.server.service import Service
from quire.server.tokens.protocol import GenerativeScoringBody
from quire.types.output import Logprob
from quire.types.request import token_list
from quire.types.sampling import RequestOutputKind, SamplingParams

router = APIRouter()
MAX_QUERY_TOKENS = 4 * 1024 * 1024  # each item has the query's tokens before or behind it
NAMES = {"logprob_token_ids": "label_token_ids", "prompt": "items"}


@router.post("/generative_scoring", openapi_extra=openapi_body(GenerativeScoringBody))
async def generative_scoring(request: Request) -> Response:
    """`score` is the first label's: its share among the labels, or with apply_softmax=false its own probability."""
    body = await read_body(request, GenerativeScoringBody)
    service: Service = request.app.state.service
    model = service.check_model(body.model)
    labels = list(dict.fromkeys(body.label_token_ids))
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=0,
        logprob_token_ids=labels,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    with field_names(NAMES):
        prompts = body.items.take() if isinstance(body.items, Prepared) else await prompts_of(service, body)
    job = generation.start(request, body, model, prompts, params, "generative-scoring")
    job.names = NAMES

    async def make() -> dict[str, Any]:
        data: list[dict[str, Any]] = [{}] * len(prompts)
        async for index, output in job.outputs():
            positions = output.outputs[0].logprobs
            assert positions
            job.num_generated += 1
            score = _score(positions[0], labels, apply_softmax=body.apply_softmax)
            data[index] = {"index": index, "object": "score", "score": score}
        shared = {name: value for name, value in job.shared("list").items() if name != "system_fingerprint"}
        return {**shared, "data": data, "usage": job.usage()}

    return JsonReply(service.in_flight, len(prompts), make)


async def prompts_of(service: Service, body: GenerativeScoringBody) -> list[PromptIds]:
    """Query and item, or item and query, as token ids; special tokens stand in front of the first of the two."""
    if len(body.items) > MAX_PROMPTS:
        raise InputError(f"items may hold at most {MAX_PROMPTS}, got {len(body.items)}", "items")
    special = body.add_special_tokens
    [query] = await _ids(service, [body.query], special and not body.item_first)
    items = await _ids(service, body.items, special and body.item_first)
    context = service.running().info.max_model_len
    if (longest := len(query) + max(map(len, items))) >= context:
        raise ContextLengthError.of(longest, 1, context)
    if (total := len(query) * len(items)) > MAX_QUERY_TOKENS:
        raise InputError(f"tokens of the query x items must be <= {MAX_QUERY_TOKENS}, got {total}", "items")
    return [PromptIds(item + query if body.item_first else query + item) for item in items]


async def _ids(service: Service, given: Sequence[str | list[int]], add_special_tokens: bool) -> list[list[int]]:
    """Of texts, or of what is ids already."""
    texts = [one for one in given if isinstance(one, str)]
    if not texts:
        return [one for one in given if isinstance(one, list)]
    encoded = await generation.tokenize_all(service, texts, add_special_tokens=add_special_tokens)
    return [token_list(ids) for ids in encoded]


def _score(entries: Mapping[int, Logprob], labels: list[int], *, apply_softmax: bool) -> float:
    """Of the first label, from the log-probabilities of all."""
    logprobs = [entries[label].logprob for label in labels]
    if not apply_softmax:
        return math.exp(logprobs[0])
    best = max(logprobs)
    powers = [math.exp(value - best) for value in logprobs]
    return powers[0] / sum(powers)
