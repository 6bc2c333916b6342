"""GET /dashboard: a page for people, and what it asks for.

The page and what belongs to it are files that know nothing of anybody: no key is needed for them, and the page asks for
one. What it shows comes from /dashboard/state and /dashboard/requests/{id}, which need the key as everything does.
"""

from __future__ import annotations

import mimetypes
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

import quire
from quire.server.dashboard.gpu import Gpus
from quire.server.dashboard.history import SHARES, Row
from quire.server.dashboard.others import Known, Others
from quire.server.dashboard.watch import Watch
from quire.server.http.auth import LACKS_KEY
from quire.server.http.errors import ApiError
from quire.server.http.trail import Trail, trail_of
from quire.server.metrics import FINISH_REASONS
from quire.server.service import Service
from quire.types.view import EngineView

if TYPE_CHECKING:
    from quire.server.processes.peer_servers import PeerServers

router = APIRouter()
STATIC = Path(__file__).parent / "static"
# Nothing but the server's own files runs, and nothing is asked of any other.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types quire"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FILES = {
    str(file.relative_to(STATIC)): file.read_bytes()
    for file in sorted(STATIC.rglob("*"))
    if file.is_file() and not file.name.endswith(".txt")
}


class Visitors:
    """What those who look at one server share."""

    def __init__(self, service: Service, peers: PeerServers | None) -> None:
        self.engine = service.running()
        self.watch = Watch(self.engine)
        self.gpus = Gpus()
        self.others = Others(service, peers)


def _visitors(request: Request) -> Visitors:
    """Raises ApiError 503 while there is no engine."""
    service: Service = request.app.state.service
    found: Visitors | None = getattr(request.app.state, "visitors", None)
    if found is None or found.engine is not service.running():
        found = request.app.state.visitors = Visitors(service, request.app.state.peers)
    return found


@router.get("/dashboard", response_class=Response)
async def dashboard() -> Response:
    """The page."""
    return Response(_FILES["index.html"], media_type="text/html; charset=utf-8", headers=_HEADERS)


@router.get("/dashboard/door")
async def door(request: Request) -> Response:
    """Whether who asks is let in, with the key of the request or because none is needed."""
    return JSONResponse({"is_open": not request.scope.get(LACKS_KEY, False)}, headers=_HEADERS)


@router.get("/dashboard/static/{name:path}", response_class=Response)
async def static(name: str) -> Response:
    """A file of the page."""
    if name not in _FILES:
        raise ApiError(404, f"there is no /dashboard/static/{name[:128]}")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(_FILES[name], media_type=kind, headers=_HEADERS)


@router.get("/dashboard/state", response_class=Response)
async def state(request: Request, since: float = Query(0.0), steps: float = Query(0.0)) -> Response:
    """All that the dashboard shows. since: rows of the history younger than this; steps: those that ended later, which
    is what `until` said the last time."""
    service: Service = request.app.state.service
    visitors = _visitors(request)
    views = await visitors.watch.look()
    known = await visitors.others.known()
    assert service.metrics is not None
    assert service.history is not None
    stats = visitors.engine.stats()
    service.history.note(stats)
    engines = [each.counted() for each in stats.engines]
    told: dict[str, Any] = {
        "now": time.time(),
        "server": _server(service, trail_of(request.scope)),
        "history": {"columns": Row.__struct_fields__, "shares": SHARES, "rows": service.history.after(since)},
        "stats": msgspec.structs.replace(stats.counted(), engines=engines),
        "wait": service.metrics.wait(),
        "rejected": service.metrics.total_rejected,
        "finished": {reason: service.metrics.num_ended(reason) for reason in FINISH_REASONS},
        "until": visitors.watch.until,
        "cores": [_core(visitors.watch, view, known, steps) for view in views],
        "ended": known.ended,
        "keys": {} if service.http_metrics is None else service.http_metrics.usage.totals(),
        "errors": known.errors,
        "silent": known.silent,
        "gpus": await visitors.gpus.look(),
    }
    return Response(msgspec.json.encode(told), media_type="application/json", headers=_HEADERS)


@router.get("/dashboard/requests/{request_id:path}", response_class=Response)
async def one_request(request: Request, request_id: str) -> Response:
    """The life of a request. Its text is shown to who has the key that it came with."""
    found = await _visitors(request).others.life(request_id, trail_of(request.scope).key)
    if found is None:
        raise ApiError(404, "this request is not known (any more): lives are kept while somebody looks, for a minute")
    return Response(msgspec.json.encode(found), media_type="application/json", headers=_HEADERS)


def _server(service: Service, trail: Trail) -> dict[str, Any]:
    info = service.running().info
    return {
        "name": service.names[0],
        "models": service.all_names,
        "version": quire.__version__,
        "created": service.created,
        "device": info.report.device,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.resolved.max_num_seqs,
        "speculative": info.resolved.speculative is not None,
        "adapters": service.all_names[len(service.names) :],
        "front_ends": len(service.counters.pages),
        "generates": info.resolved.pooler is None,
        "key": trail.key,
        "problem": service.not_ready(),
    }


def _core(watch: Watch, view: EngineView, known: Known, moment: float) -> dict[str, Any]:
    """What one core shows, its requests with the names of their keys and routes behind them. moment: steps after it."""
    listed = []
    for each in view.requests:
        key, route = known.trails.get(each.id) or known.trails.get(each.id.rsplit("#", 1)[0]) or (None, None)
        listed.append([*msgspec.structs.astuple(each), key, route])
    return {
        "engine": view.engine,
        "steps": watch.steps_after(view.engine, moment),
        "cells": view.cells,
        "requests": listed,
        "num_requests": view.num_requests,
    }
