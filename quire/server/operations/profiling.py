"""POST /start_profile and /stop_profile, where `profiler_config` lets profiles be recorded."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from quire.server.service import Service

router = APIRouter()


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    service: Service = request.app.state.service
    await service.running().start_profile()
    return JSONResponse({"success": True})


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """`path` is that of the trace, on the server; null if another program has it."""
    service: Service = request.app.state.service
    return JSONResponse({"success": True, "path": await service.running().stop_profile()})
