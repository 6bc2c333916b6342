"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.server.service import Service

router = APIRouter()


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "quire",
        "root": service.config.model.model or name,
        "parent": None,
        "vocab_size": service.running().info.resolved.info.vocab_size,
        "max_model_len": service.running().info.max_model_len,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in service.names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    service: Service = request.app.state.service
    return JSONResponse(_card(service, service.check_model(name)))
