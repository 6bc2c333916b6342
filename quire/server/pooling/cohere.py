"""POST /v2/embed: embeddings in the shape of Cohere's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from quire.foundation.errors import InputError
from quire.frontend.pooling.requests import PoolingPrompt, pooler_of
from quire.frontend.tokenization.truncation import Truncation
from quire.server.http.body import openapi_body, read_body
from quire.server.http.sse import JsonReply
from quire.server.pooling import job as pooling_job
from quire.server.pooling.job import MAX_INPUTS
from quire.server.pooling.protocol import CohereEmbedBody
from quire.server.pooling.vectors import to_base64
from quire.types.pooling import EMBED

router = APIRouter()
# Cohere's words for what sentence-transformers calls otherwise.
_PROMPT_NAMES = {"search_query": ("query",), "search_document": ("document", "passage", "corpus")}


@router.post("/v2/embed", openapi_extra=openapi_body(CohereEmbedBody))
async def embed(request: Request) -> Response:
    body = await read_body(request, CohereEmbedBody)
    texts = _texts(body)
    job = pooling_job.start(request, body, "embd", task=EMBED, dimensions=body.output_dimension)
    job.field = "texts"
    info = job.service.running().info
    pooler = pooler_of(info)
    prefix = _prefix(body.input_type, dict(pooler.prompts))
    if prefix and not pooler.include_prompt:
        raise InputError(
            f"input_type={body.input_type!r} is not supported: this model's vectors leave the words before a text out",
            "input_type",
        )
    limit = None if body.truncate == "NONE" else min(body.max_tokens or info.max_model_len, info.max_model_len)
    cut = Truncation(limit, "left" if body.truncate == "START" else "right")
    if body.truncate_prompt_tokens is not None:
        cut = Truncation.of(body.truncate_prompt_tokens, body.truncation_side or cut.side, info)
    ids = await pooling_job.encode(job.service, [prefix + text for text in texts], cut, job.field)
    prompts = [PoolingPrompt(one, None, body.cache_salt) for one in ids]

    async def make() -> dict[str, Any]:
        vectors = [output.outputs.data for output in await job.run(prompts)]
        return {
            "id": job.id,
            "embeddings": {kind: _as(kind, vectors) for kind in dict.fromkeys(body.embedding_types)},
            "texts": texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": job.num_prompt_tokens, "image_tokens": 0},
            },
            "response_type": "embeddings_by_type",
        }

    return JsonReply(job.service.in_flight, len(prompts), make)


def _texts(body: CohereEmbedBody) -> list[str]:
    if body.images:
        raise InputError("images are not supported by this model", "images")
    if (body.texts is None) == (body.inputs is None):
        raise InputError("give exactly one of texts and inputs", "texts")
    texts = body.texts if body.texts is not None else [_text(item) for item in body.inputs or ()]
    if not 1 <= len(texts) <= MAX_INPUTS or not all(texts):
        raise InputError(f"texts must hold 1 to {MAX_INPUTS} texts, none of them empty", "texts")
    return texts


def _text(item: Mapping[str, Any]) -> str:
    parts = item.get("content")
    if not isinstance(parts, list) or not all(isinstance(p, Mapping) and p.get("type") == "text" for p in parts):
        raise InputError("inputs must hold objects with content: a list of text parts", "inputs")
    return "\n".join(str(part.get("text", "")) for part in parts)


def _prefix(input_type: str | None, prompts: Mapping[str, str]) -> str:
    """What the model wants before a text of this kind."""
    names = () if input_type is None else (input_type, *_PROMPT_NAMES.get(input_type, ()))
    return next((prompts[name] for name in names if name in prompts), "")


def _as(kind: str, vectors: Sequence[np.ndarray]) -> list[Any]:
    if kind == "float":
        return list(vectors)
    if kind == "base64":
        return [to_base64(vector, endianness="little") for vector in vectors]
    bits = [np.packbits(vector > 0) for vector in vectors]
    return [one if kind == "ubinary" else (one.astype(np.int16) - 128).astype(np.int8) for one in bits]
