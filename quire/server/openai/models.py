"""GET /v1/models, as OpenAI's clients read it, and as Anthropic's do (their header says who asks)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.server.http.errors import ApiError, asks_as_anthropic
from quire.server.service import Service

router = APIRouter()
_PAGE, _MAX_PAGE = 20, 1000  # models; Anthropic's


def _card(service: Service, name: str) -> dict[str, Any]:
    adapter = service.adapter_of(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "quire",
        "root": (service.config.model.model or name) if adapter is None else adapter.lora_path,
        "parent": None if adapter is None else adapter.base_model_name or service.names[0],
        "vocab_size": service.running().info.resolved.info.vocab_size,
        "max_model_len": service.running().info.max_model_len if adapter is None else None,
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": service.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


def _anthropic_card(service: Service, name: str) -> dict[str, Any]:
    context = service.running().info.max_model_len
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    if asks_as_anthropic(request.scope):
        return JSONResponse(_anthropic_page(service, request))
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in service.all_names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    service: Service = request.app.state.service
    card = _anthropic_card if asks_as_anthropic(request.scope) else _card
    return JSONResponse(card(service, service.check_model(name)))


def _anthropic_page(service: Service, request: Request) -> dict[str, Any]:
    """Models behind `after_id` or before `before_id`, at most `limit`. Raises ApiError 400."""
    query, names = request.query_params, service.all_names
    limit = query.get("limit", str(_PAGE))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= _MAX_PAGE):
        raise ApiError(400, f"limit must be an integer in [1, {_MAX_PAGE}], got {limit[:80]!r}", "limit")
    for key in ("after_id", "before_id"):
        if key in query and query[key] not in names:
            raise ApiError(400, f"{key} must be a model that is served, got {query[key][:80]!r}", key)
    if "after_id" in query:
        names = names[names.index(query["after_id"]) + 1 :]
    page = names[: int(limit)]
    if "before_id" in query:
        names = names[: names.index(query["before_id"])] if query["before_id"] in names else []
        page = names[-int(limit) :]
    return {
        "data": [_anthropic_card(service, name) for name in page],
        "has_more": len(page) < len(names),
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }
