"""POST /classify: the probability of each class."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from quire.frontend.pooling.requests import pooler_of
from quire.server.http.body import openapi_body, read_body
from quire.server.http.sse import JsonReply
from quire.server.pooling import job as pooling_job
from quire.server.pooling.protocol import ClassifyBody
from quire.types.pooling import CLASSIFY

router = APIRouter()


@router.post("/classify", openapi_extra=openapi_body(ClassifyBody))
async def classify(request: Request) -> Response:
    body = await read_body(request, ClassifyBody)
    job = pooling_job.start(request, body, "classify", task=CLASSIFY)
    prompts = await pooling_job.prompts_of(request, body)
    labels = pooler_of(job.service.running().info).labels

    async def make() -> dict[str, Any]:
        data = []
        for index, output in enumerate(await job.run(prompts)):
            probs = output.outputs.data
            best = int(probs.argmax())
            data.append({"index": index, "label": labels[best], "probs": probs, "num_classes": len(probs)})
        return {**job.shared(), "data": data, "usage": job.usage()}

    return JsonReply(job.service.in_flight, len(prompts), make)
