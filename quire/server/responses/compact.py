"""POST /v1/responses/compact: a conversation becomes what its user said, and the model's summary of all of it."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.server.generate.answer import AnswerStream
from quire.server.generate.chat_job import start_chat
from quire.server.generate.sealed import seal
from quire.server.http.body import look_into, openapi_body, read_body
from quire.server.http.sse import JsonReply
from quire.server.responses.body import CountBody
from quire.server.responses.endpoints import conversation, items_elsewhere, read_input, store_of
from quire.server.responses.events import usage_of
from quire.server.responses.items import new_id
from quire.server.service import Service
from quire.types.reply import Content

router = APIRouter()
MAX_SUMMARY = 4096  # tokens; a quarter of the context where that is less
WISH = (
    "Stop here and summarise this conversation for somebody who will continue it and sees nothing of it but the user's "
    "messages and your summary: what is wanted, what was done and decided and why, what was found out (names, paths, "
    "values, errors, word for word where it matters), what is unfinished and what comes next. Answer with the summary "
    "alone and call no function."
)


@router.post("/v1/responses/compact", openapi_extra=openapi_body(CountBody))
async def compact(request: Request) -> Response:
    """The oldest turns are left out of what is summarised if the context does not hold all."""
    body = await read_body(request, CountBody, keeps=request.app.state.peers is not None)
    service: Service = request.app.state.service
    context = service.running().info.max_model_len
    model = service.check_model(body.model)
    elsewhere = await items_elsewhere(request, body)
    items, before = await look_into(request, lambda: read_input(body, store_of(request), elsewhere))
    wish = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": WISH}]}
    _, chat = await look_into(request, lambda: conversation(service, body, [*items, wish], before))
    chat.max_completion_tokens = max(1, min(MAX_SUMMARY, context // 4))
    job, plan = await start_chat(request, chat, model, body.names, job_id=new_id("resp"), shorten=True, clamp=True)
    said = [*(before.conversation() if before is not None else ()), *items]
    kept = [item for item in said if item["type"] == "message" and item.get("role") == "user"]

    async def make() -> dict[str, Any]:
        answer = AnswerStream(job, plan)
        pieces = []
        async with aclosing(job.outputs()) as outputs:
            async for _, output in outputs:
                pieces += answer.take(output)
        summary = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        compaction = {"id": new_id("cmp"), "type": "compaction", "encrypted_content": seal(summary)}
        return {
            "id": job.id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*kept, compaction],
            "usage": usage_of(answer),
        }

    return JsonReply(service.in_flight, 1, make)
