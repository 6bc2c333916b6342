"""POST /score and /rerank: how well documents fit a query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.foundation.errors import ContextLengthError, InputError
from quire.frontend.pooling.api import check_cross_encoder, pair_up
from quire.frontend.pooling.prompts import Pair, PairEncoder, pair_template
from quire.frontend.pooling.requests import pooler_of
from quire.frontend.pooling.similarity import sides, similarity, task_of
from quire.frontend.text import most_chars
from quire.frontend.tokenization.truncation import Truncation
from quire.server.generate.params import field_names
from quire.server.http.body import openapi_body, read_body
from quire.server.http.sse import JsonReply
from quire.server.pooling import job as pooling_job
from quire.server.pooling.job import MAX_INPUTS, PoolingJob
from quire.server.pooling.protocol import PairBody, RerankBody, ScoreBody
from quire.types.pooling import CLASSIFY, EMBED, TOKEN_EMBED

router = APIRouter()
MAX_PAIR_CHARS = 8 * 1024 * 1024  # of a request, with the query once a document


@router.post("/score", openapi_extra=openapi_body(ScoreBody))
@router.post("/v1/score", openapi_extra=openapi_body(ScoreBody))
async def score(request: Request) -> Response:
    body = await read_body(request, ScoreBody)
    first, second, first_name, second_name = body.sides
    with field_names({"data": second_name}):
        pairs = pair_up(_texts(first, first_name), _texts(second, second_name))
    job = _start(request, body, "embd", second_name)

    async def make() -> dict[str, Any]:
        scores = await _score(job, body, pairs)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        return {**job.shared(), "data": data, "usage": job.usage()}

    return JsonReply(job.service.in_flight, len(pairs), make)


@router.post("/rerank", openapi_extra=openapi_body(RerankBody))
@router.post("/v1/rerank", openapi_extra=openapi_body(RerankBody))
@router.post("/v2/rerank", openapi_extra=openapi_body(RerankBody))
async def rerank(request: Request) -> Response:
    body = await read_body(request, RerankBody)
    query, documents = _texts(body.query, "query"), _texts(body.documents, "documents")
    if len(query) != 1:
        raise InputError(f"query must be one text, got {len(query)}", "query")
    job = _start(request, body, "rerank", "documents")

    async def make() -> dict[str, Any]:
        scores = await _score(job, body, [(query[0], document) for document in documents])
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        results = [
            {"index": i, "document": {"text": documents[i], "multi_modal": None}, "relevance_score": scores[i]}
            for i in order
        ]
        return {"id": job.id, "model": job.model, "usage": job.usage(), "results": results}

    return JsonReply(job.service.in_flight, len(documents), make)


def _start(request: Request, body: PairBody, prefix: str, name: str) -> PoolingJob:
    info = request.app.state.service.running().info
    if pooler_of(info).kind == CLASSIFY:
        check_cross_encoder(info)
    pooler = pooler_of(info)
    job = pooling_job.start(request, body, prefix, task=task_of(pooler) if pooler.kind == EMBED else None)
    job.field = name
    return job


async def _score(job: PoolingJob, body: PairBody, pairs: list[Pair]) -> list[float]:
    service = job.service
    info = service.running().info
    cut = Truncation.of(body.truncate_prompt_tokens, body.truncation_side, info)
    if job.task in (EMBED, TOKEN_EMBED):
        for name in ("instruction", "chat_template_kwargs"):
            if getattr(body, name):
                raise InputError(f"{name} has no place where texts are compared by their vectors", name)
        return await _compare(job, body, pairs, cut)
    tokenizer = service.tokenizer()
    template = pair_template(tokenizer, info)
    if template is None and body.chat_template_kwargs:
        raise InputError("chat_template_kwargs needs a model with a chat template for pairs", "chat_template_kwargs")
    limits = (body.max_tokens_per_query, body.max_tokens_per_doc)
    encoder = PairEncoder(tokenizer, cut, *limits, template, body.chat_template_kwargs, body.instruction)
    _check_size(pairs, info.max_model_len)
    prompts = await service.encoder.encode_pairs(encoder, pairs)
    return [float(output.outputs.data[0]) for output in await job.run(prompts)]


def _check_size(pairs: list[Pair], context: int) -> None:
    """Raises InputError for more text than is encoded at once: a query counts with each of its documents."""
    for pair in pairs:
        for text in pair:
            if len(text) > most_chars(context):
                raise ContextLengthError.of_chars(len(text), most_chars(context), context)
    if (total := sum(len(a) + len(b) for a, b in pairs)) > MAX_PAIR_CHARS:
        raise InputError(f"documents: all pairs have {total} characters, and at most {MAX_PAIR_CHARS} are read", "data")


async def _compare(job: PoolingJob, body: PairBody, pairs: list[Pair], cut: Truncation) -> list[float]:
    """By embeddings: each text is embedded once, however many pairs it is in."""
    info = job.service.running().info
    pooler, framing = pooler_of(info), sides(info, job.service.tokenizer())
    texts, prompts = [], []
    for number, most in enumerate((body.max_tokens_per_query, body.max_tokens_per_doc)):
        found, side = list(dict.fromkeys(pair[number] for pair in pairs)), framing[number]
        texts += [(number, text) for text in found]
        ids = await pooling_job.encode(job.service, found, side.cut(cut, most), job.field)
        prompts += [side.prompt(one, body.cache_salt) for one in ids]
    vectors = {
        (number, text): framing[number].counted(output)
        for (number, text), output in zip(texts, await job.run(prompts), strict=True)
    }
    return [similarity(pooler, vectors[0, query], vectors[1, document]) for query, document in pairs]


def _texts(given: Any, name: str) -> list[str]:
    """One text or many; a text may stand in an object, as `text` or as the text parts of `content`."""
    items = given if isinstance(given, list) else [given]
    if not items or len(items) > MAX_INPUTS:
        raise InputError(f"{name} must be a text or a list of 1 to {MAX_INPUTS} texts, got {len(items)}", name)
    return [_text(item, name if len(items) == 1 else f"{name}[{i}]", name) for i, item in enumerate(items)]


def _text(item: Any, where: str, name: str) -> str:
    if isinstance(item, Mapping):
        parts = item.get("content")
        if isinstance(parts, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in parts):
            item = "\n".join(str(part.get("text", "")) for part in parts)
        else:
            item = item.get("text")
    if not isinstance(item, str) or not item:
        raise InputError(f"{where} must be a non-empty text", name)
    return item
