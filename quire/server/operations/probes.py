"""Probes, metrics, version."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

import quire
from quire.foundation.aside import aside
from quire.server.http.errors import error_response
from quire.server.service import Service

router = APIRouter()


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _probe(problem: str | None) -> Response:
    return Response(status_code=200) if problem is None else error_response(503, problem)


@router.get("/livez", response_class=Response)
async def livez() -> Response:
    """The process that answers HTTP lives. The engine is not asked: a restart would not help one that works."""
    return _probe(None)


@router.get("/startupz", response_class=Response)
async def startupz(request: Request) -> Response:
    """The model is loaded."""
    return _probe(None if service_of(request).engine is not None else "the model is still loading")


@router.get("/readyz", response_class=Response)
async def readyz(request: Request) -> Response:
    """New requests are welcome: loaded, alive, not draining, not hung."""
    return _probe(service_of(request).not_ready())


@router.get("/health", response_class=Response)
@router.get("/ping", response_class=Response)
@router.post("/ping", response_class=Response)
async def health(request: Request) -> Response:
    """The engine is loaded, alive and not hung: its core and worker respond."""
    return _probe(service_of(request).unhealthy())


@router.get("/version")
async def version() -> Response:
    return JSONResponse({"version": quire.__version__})


@router.get("/load")
async def load(request: Request) -> Response:
    """Answers being made or waiting."""
    return JSONResponse({"server_load": service_of(request).in_flight.total()})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    service = service_of(request)
    if service.engine is None or service.metrics is None:
        return error_response(503, "the model is still loading")
    stats, render = service.engine.stats(), service.metrics.render
    text = await aside(lambda: render(stats), len(stats.engines), 1)  # some ten milliseconds for each of several cores
    if service.http_metrics is not None:
        text += service.http_metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
