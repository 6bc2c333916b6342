"""POST /v1/responses, and what can be done with responses that are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.foundation.errors import InputError
from quire.server.generate.answer import AnswerStream
from quire.server.generate.chat_job import chat_body, count_tokens, start_chat
from quire.server.generate.conversation import Conversation, takes_late_system
from quire.server.generate.protocol import ChatBody
from quire.server.http.body import look_into, openapi_body, read_body
from quire.server.http.errors import ApiError
from quire.server.http.sse import EventStream, JsonReply
from quire.server.processes.peer_servers import PeerServers
from quire.server.responses.background import BackgroundRun
from quire.server.responses.body import CountBody, ResponsesBody
from quire.server.responses.events import ResponseWriter
from quire.server.responses.input import Tools, add_items, choice, resolve, with_ids
from quire.server.responses.store import ResponseStore, Stored, Turn, new_response_id
from quire.server.service import Service

router = APIRouter()
Item = dict[str, Any]


def store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


async def is_kept_elsewhere(request: Request, response_id: str) -> bool:
    """By another front end of this server."""
    peers: PeerServers | None = request.app.state.peers
    return peers is not None and await peers.has_response(request.scope, response_id)


@router.post("/v1/responses", openapi_extra=openapi_body(ResponsesBody))
async def responses(request: Request) -> Response:
    body = await read_body(request, ResponsesBody, keeps=request.app.state.peers is not None)
    service: Service = request.app.state.service
    service.running()
    store = store_of(request)
    model = service.check_model(body.model)
    keeps = body.store and store.max_bytes > 0
    if body.background and not keeps:
        raise InputError("background needs a server that keeps responses (option response_store_bytes)", "background")
    response_id = body.request_id or new_response_id(service.counters.number)
    if body.request_id and (response_id in store or await is_kept_elsewhere(request, response_id)):
        raise InputError(f"request_id {response_id!r} is in use by a stored response", "request_id")
    elsewhere = await items_elsewhere(request, body)
    items, before = await look_into(request, lambda: read_input(body, store, elsewhere))
    tools, chat = await look_into(request, lambda: conversation(service, body, items, before))
    job, plan = await start_chat(
        request, chat, model, body.names, job_id=response_id, shorten=body.truncation == "auto"
    )
    answer = AnswerStream(job, plan, body.top_logprobs if body.wants_logprobs else None)
    response = body.response(response_id, model, job.params.temperature, job.params.top_p)
    stored = Stored(response, items, before)

    def keep() -> None:
        if keeps:
            store.open(stored)
            store.settle(stored)

    writer = ResponseWriter(
        answer,
        response,
        tools.names,
        seals_reasoning=body.seals_reasoning,
        on_end=(lambda: None) if body.background else keep,
    )
    if body.background:
        store.open(stored)
        stored.run = BackgroundRun(job, writer, lambda: store.settle(stored))
        if not body.stream:
            return JSONResponse(response)
        return EventStream(service.in_flight, 0, stored.run.follow, end=b"")
    if body.stream:
        return EventStream(service.in_flight, 1, writer.frames, end=b"", failed=writer.failed)
    return JsonReply(service.in_flight, 1, writer.whole)


@router.post("/v1/responses/input_tokens", openapi_extra=openapi_body(CountBody))
async def input_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    body = await read_body(request, CountBody, keeps=request.app.state.peers is not None)
    service: Service = request.app.state.service
    service.running()
    service.check_model(body.model)
    elsewhere = await items_elsewhere(request, body)
    items, before = await look_into(request, lambda: read_input(body, store_of(request), elsewhere))
    _, chat = await look_into(request, lambda: conversation(service, body, items, before))
    return JSONResponse(
        {"object": "response.input_tokens", "input_tokens": await count_tokens(request, chat, body.names)}
    )


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str, stream: bool = False, starting_after: int = -1) -> Response:
    service: Service = request.app.state.service
    stored = store_of(request).get(response_id)
    if not stream:
        return JSONResponse(stored.response)
    run = stored.run
    if run is None:
        raise InputError("only a response that was made in the background can be streamed later", "stream")
    return EventStream(service.in_flight, 0, lambda: run.follow(starting_after), end=b"")


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> Response:
    stored = store_of(request).get(response_id)
    if stored.run is None:
        raise InputError("only a response that is made in the background can be cancelled", "response_id")
    if stored.is_running:
        await stored.run.cancel()
    elif stored.response["status"] != "cancelled":
        raise InputError(f"the response is {stored.response['status']} and cannot be cancelled", "response_id")
    return JSONResponse(stored.response)


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """A response that still runs is cancelled. Responses that continue it go on knowing its turn."""
    store = store_of(request)
    stored = store.get(response_id)
    store.delete(stored)
    if stored.run is not None:
        await stored.run.cancel()
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(
    request: Request, response_id: str, after: str | None = None, limit: int = 20, order: str = "desc"
) -> Response:
    """The items of the request itself, newest first unless `order` is asc."""
    items = list(store_of(request).get(response_id).input)
    if order not in ("asc", "desc"):
        raise InputError(f"order must be asc or desc, got {order[:80]!r}", "order")
    if not 1 <= limit <= 100:
        raise InputError(f"limit must be in [1, 100], got {limit}", "limit")
    if order == "desc":
        items.reverse()
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise ApiError(404, f"there is no input item with the id {after[:256]!r}", "after")
        items = items[at + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(items) > limit})


async def items_elsewhere(request: Request, body: CountBody) -> dict[str, Item]:
    """Items that the request refers to and that other front ends of this server keep."""
    peers: PeerServers | None = request.app.state.peers
    if peers is None or isinstance(body.input, str):
        return {}
    items = await look_into(request, lambda: with_ids(body.input))
    references = [str(item.get("id")) for item in items if item["type"] == "item_reference"]
    missing = [item_id for item_id in references if store_of(request).item(item_id) is None]
    return await peers.items(missing) if missing else {}


def read_input(body: CountBody, store: ResponseStore, elsewhere: Mapping[str, Item]) -> tuple[list[Item], Turn | None]:
    """The items of the request, and the turn that they continue. Raises InputError and ApiError 404.

    elsewhere: stored items that are not in `store`.
    """
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    items = resolve(with_ids(given), lambda item_id: store.item(item_id) or elsewhere.get(item_id))
    if body.previous_response_id is None:
        return items, None
    previous = store.get(body.previous_response_id, "previous_response_id")
    if previous.is_running:
        raise InputError("previous_response_id names a response that is still being made", "previous_response_id")
    return items, previous.turn


def conversation(service: Service, body: CountBody, items: list[Item], before: Turn | None) -> tuple[Tools, ChatBody]:
    """The functions the model may call, and the chat request. Raises InputError naming the client's field."""
    tools = Tools()
    tools.add(body.tools, "tools")
    talk = Conversation(late_system=takes_late_system(service.running().chat_template))
    if body.instructions:
        talk.system(body.instructions)
    if before is not None:
        add_items(talk, before.conversation(), tools, "previous_response_id")
    add_items(talk, items, tools)
    picked = choice(body.tool_choice, tools)
    if tools.hosted and not tools.functions:
        raise InputError(
            f"tools of the type {tools.hosted[0][:80]!r} are run by OpenAI's servers; here a model can call functions "
            "and custom tools, which the client runs",
            "tools",
        )
    return tools, chat_body(body.chat_fields(talk.finish(), tools, picked), body.names)
