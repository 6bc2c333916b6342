"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.server.anthropic.body import NAMES, CountTokensBody, MessagesBody
from quire.server.anthropic.events import PING, MessageWriter
from quire.server.anthropic.input import add_messages, add_system, functions
from quire.server.generate.answer import AnswerStream
from quire.server.generate.chat_job import chat_body, count_tokens, start_chat
from quire.server.generate.conversation import Conversation, takes_late_system
from quire.server.generate.protocol import ChatBody
from quire.server.http.body import look_into, openapi_body, read_body
from quire.server.http.errors import ApiError
from quire.server.http.long_body import Prepared
from quire.server.http.sse import EventStream, JsonReply
from quire.server.service import Service

router = APIRouter()
METHODS = {"allow": "POST, HEAD, OPTIONS"}


@router.post("/v1/messages", openapi_extra=openapi_body(MessagesBody))
async def messages(request: Request) -> Response:
    body = await read_body(request, MessagesBody)
    refuse_thread(body)
    service: Service = request.app.state.service
    service.running()
    model = service.check_model(body.model)
    message_id = f"msg_{secrets.token_hex(16)}"
    chat = await look_into(request, lambda: chat_request(service, body))
    job, plan = await start_chat(request, chat, model, NAMES, job_id=message_id, clamp=True)
    writer = MessageWriter(
        AnswerStream(job, plan), message_id, model, body.max_tokens, omits_thinking=body.omits_thinking
    )
    if body.stream:
        return EventStream(service.in_flight, 1, writer.frames, end=b"", failed=writer.failed, alive=PING)
    return JsonReply(service.in_flight, 1, writer.whole)


@router.post("/v1/messages/count_tokens", openapi_extra=openapi_body(CountTokensBody))
async def count(request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    body = await read_body(request, CountTokensBody)
    service: Service = request.app.state.service
    service.running()
    service.check_model(body.model)
    chat = await look_into(request, lambda: chat_request(service, body))
    num_tokens = await count_tokens(request, chat, NAMES)
    return JSONResponse({"input_tokens": num_tokens, "context_management": {"original_input_tokens": num_tokens}})


@router.api_route("/v1/messages", methods=["HEAD", "OPTIONS"], include_in_schema=False)
@router.api_route("/v1/messages/count_tokens", methods=["HEAD", "OPTIONS"], include_in_schema=False)
async def reachable() -> Response:
    """Clients ask before they send."""
    return Response(headers=METHODS)


def refuse_thread(body: MessagesBody) -> None:
    """A client that keeps its conversation in a thread sends only what is new. Told this, it sends all of it again."""
    if body.thread is not None:
        raise ApiError(
            400,
            "thread is not supported by this version: send the whole conversation without it",
            "thread",
            {"error_code": "thread_unsupported_request"},
        )


def chat_request(service: Service, body: CountTokensBody) -> ChatBody:
    """The chat request that this means. Raises InputError naming the client's field."""
    if isinstance(body.messages, Prepared):
        return body.messages.take()
    talk = Conversation(late_system=takes_late_system(service.running().chat_template))
    add_system(talk, body.system)
    add_messages(talk, body.messages)
    fields = body.chat_fields(talk.finish(), functions(body.tools, body.messages))
    if service.running().formats.reasoning is not None and body.thinking is not None:
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    return chat_body(fields, NAMES)
