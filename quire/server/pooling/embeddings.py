"""POST /v1/embeddings, and /pooling, which gives any vector the model makes."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from quire.foundation.errors import InputError
from quire.server.http.body import openapi_body, read_body
from quire.server.http.sse import JsonReply
from quire.server.pooling import job as pooling_job
from quire.server.pooling.job import Output, PoolingJob
from quire.server.pooling.protocol import EmbeddingBody, PoolBody
from quire.server.pooling.vectors import BytesReply, to_base64, to_bytes
from quire.types.pooling import EMBED, SPARSE_EMBED, PoolingOutput

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=openapi_body(EmbeddingBody))
async def embeddings(request: Request) -> Response:
    body = await read_body(request, EmbeddingBody)
    job = pooling_job.start(request, body, "embd", task=EMBED, dimensions=body.dimensions)
    pooling_job.choose_purpose(job, body)
    return await _answer(request, job, body, "embedding", "embedding")


@router.post("/pooling", openapi_extra=openapi_body(PoolBody))
async def pool(request: Request) -> Response:
    body = await read_body(request, PoolBody)
    job = pooling_job.start(request, body, "pool", task=body.task)
    return await _answer(request, job, body, "pooling", "data")


async def _answer(request: Request, job: PoolingJob, body: EmbeddingBody, kind: str, name: str) -> Response:
    """kind: what each item is called; name: the field that holds its vector."""
    if job.task == SPARSE_EMBED and body.encoding_format != "float":
        raise InputError(f"encoding_format must be 'float' for task {SPARSE_EMBED!r}", "encoding_format")
    prompts = await pooling_job.prompts_of(request, body)

    async def as_json() -> dict[str, Any]:
        outputs = await job.run(prompts)
        data = [
            {"index": index, "object": kind, name: _value(output.outputs, body)} for index, output in enumerate(outputs)
        ]
        return {**job.shared(), "data": data, "usage": job.usage()}

    async def as_bytes() -> tuple[bytes, dict[str, Any] | None]:
        outputs = await job.run(prompts)
        content = [to_bytes(output.outputs.data, body.embed_dtype, body.endianness) for output in outputs]
        return b"".join(content), _metadata(job, body, outputs, content) if body.encoding_format == "bytes" else None

    if body.encoding_format in ("bytes", "bytes_only"):
        return BytesReply(job.service.in_flight, len(prompts), as_bytes)
    return JsonReply(job.service.in_flight, len(prompts), as_json)


def _value(output: PoolingOutput, body: EmbeddingBody) -> np.ndarray | str | dict[str, np.ndarray]:
    data = output.data
    if output.indices is not None:
        return {"indices": output.indices, "values": data}
    return data if body.encoding_format == "float" else to_base64(data, body.embed_dtype, body.endianness)


def _metadata(job: PoolingJob, body: EmbeddingBody, outputs: list[Output], content: list[bytes]) -> dict[str, Any]:
    items, start = [], 0
    for index, (output, piece) in enumerate(zip(outputs, content, strict=True)):
        items.append(
            {
                "index": index,
                "embed_dtype": body.embed_dtype,
                "endianness": body.endianness,
                "start": start,
                "end": start + len(piece),
                "shape": list(output.outputs.data.shape),
            }
        )
        start += len(piece)
    return {"id": job.id, "created": job.created, "model": job.model, "data": items, "usage": job.usage()}
