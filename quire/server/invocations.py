"""POST /invocations, the one route of SageMaker: what is asked is seen from the fields."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from quire.foundation.errors import InputError
from quire.server.http.body import Body, read_body
from quire.server.openai.chat import chat_completions
from quire.server.openai.completions import completions
from quire.server.pooling.classification import classify
from quire.server.pooling.embeddings import embeddings
from quire.server.pooling.scoring import rerank, score
from quire.server.responses.endpoints import responses
from quire.server.service import Service

router = APIRouter()


class AnyBody(Body, extra="allow"):
    """The fields count, not what they hold."""


@router.post("/invocations")
async def invocations(request: Request) -> Response:
    """A generating model: messages, prompt or input; a pooling one: what its tasks take."""
    fields = (await read_body(request, AnyBody, keeps=True)).model_fields_set
    service: Service = request.app.state.service
    pooler = service.running().info.resolved.pooler
    if pooler is not None:
        if {"query", "documents"} <= fields:
            return await rerank(request)
        if fields & {"text_1", "text_2", "queries", "data_1", "data_2"}:
            return await score(request)
        if "classify" in pooler.tasks and "embed" not in pooler.tasks:
            return await classify(request)
        return await embeddings(request)
    if "messages" in fields:
        return await chat_completions(request)
    if "prompt" in fields:
        return await completions(request)
    if "input" in fields:
        return await responses(request)
    raise InputError("the body must hold messages (chat), prompt (completion) or input (response)")
