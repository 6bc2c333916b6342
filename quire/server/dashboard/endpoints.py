"""GET /dashboard: a page for people, and what it asks for.

The page and what belongs to it are files that know nothing of anybody: no key is needed for them, and the page asks for
one. What it shows comes from /dashboard/state and /dashboard/requests/{id}, which need the key as everything does.
"""

from __future__ import annotations

import mimetypes
import time
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

import quire
from quire.config.serve import ServeConfig
from quire.server.dashboard.gpu import Gpus
from quire.server.dashboard.history import SHARES, Row
from quire.server.dashboard.life import life_of
from quire.server.dashboard.watch import Watch
from quire.server.http.auth import LACKS_KEY
from quire.server.http.errors import ApiError
from quire.server.http.trail import NO_KEY, Trail, trail_of
from quire.server.service import Service
from quire.types.view import EngineView

router = APIRouter()
STATIC = Path(__file__).parent / "static"
MAX_ERRORS = 50
MAX_ENDED = 100
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

    def __init__(self, service: Service) -> None:
        self.engine = service.running()
        self.watch = Watch(self.engine)
        self.gpus = Gpus()


def _visitors(request: Request) -> Visitors:
    """Raises ApiError 503 while there is no engine."""
    service: Service = request.app.state.service
    found: Visitors | None = getattr(request.app.state, "visitors", None)
    if found is None or found.engine is not service.running():
        found = request.app.state.visitors = Visitors(service)
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
async def state(request: Request, since: float = Query(0.0), step: int = Query(-1)) -> Response:
    """All that the dashboard shows. since: rows of the history younger than this; step: steps behind it."""
    service: Service = request.app.state.service
    visitors = _visitors(request)
    view = await visitors.watch.look()
    assert service.metrics is not None
    assert service.history is not None
    stats = visitors.engine.stats()
    service.history.note(stats)
    fresh = msgspec.structs.replace(stats, step_tokens=[], step_seconds=[], step_gaps=[])
    told: dict[str, Any] = {
        "now": time.time(),
        "server": _server(service, trail_of(request.scope)),
        "history": {"columns": Row.__struct_fields__, "shares": SHARES, "rows": service.history.after(since)},
        "stats": fresh,
        "wait": service.metrics.wait(),
        "rejected": service.metrics.total_rejected,
        "finished": {name: service.metrics.finished.total(name) for name in service.metrics.finished.names},
        "steps": visitors.watch.steps_after(step),
        "cells": view.cells,
        "requests": _requests(service, view),
        "num_requests": view.num_requests,
        "ended": _ended(service, visitors),
        "keys": {} if service.http_metrics is None else service.http_metrics.usage.totals(),
        "errors": [_error(trail) for trail in reversed(service.trails.failed)][:MAX_ERRORS],
        "gpus": await visitors.gpus.look(),
    }
    return Response(msgspec.json.encode(told), media_type="application/json", headers=_HEADERS)


@router.get("/dashboard/requests/{request_id:path}", response_class=Response)
async def one_request(request: Request, request_id: str) -> Response:
    """The life of a request. Its text is shown to who has the key that it came with."""
    service: Service = request.app.state.service
    visitors = _visitors(request)
    trail = _trail(service, request_id)
    shows_text = trail is not None and may_read(service.serve, trail.key, trail_of(request.scope).key)
    found = await life_of(visitors.engine, request_id, trail, shows_text=shows_text)
    if found is None:
        raise ApiError(404, "this request is not known (any more): lives are kept while somebody looks, for a minute")
    return Response(msgspec.json.encode(found), media_type="application/json", headers=_HEADERS)


def may_read(serve: ServeConfig, key: str, asker: str) -> bool:
    """Whether who asks with one key may read what came with another. Of a server without keys, only on its own
    machine: there everybody is the same nobody."""
    is_own_machine = serve.uds is not None or serve.host.startswith("127.") or serve.host in ("localhost", "::1")
    return key == asker and (key != NO_KEY or is_own_machine)


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


def _requests(service: Service, view: EngineView) -> list[list[Any]]:
    """Each with the names of its key and route behind it; of requests of other front ends nothing is known of these."""
    trails = {engine_id: trail for trail in service.trails for engine_id in trail.engine_ids}
    listed = []
    for each in view.requests:
        trail = trails.get(each.id) or trails.get(each.id.rsplit("#", 1)[0])
        fields = msgspec.structs.astuple(each)
        listed.append([*fields, trail.key if trail else None, trail.route if trail else None])
    return listed


def _ended(service: Service, visitors: Visitors) -> list[dict[str, Any]]:
    found = []
    for ended in visitors.engine.latest()[:MAX_ENDED]:
        trail, times = _trail(service, ended.request_id), ended.metrics
        found.append(
            {
                "id": ended.request_id,
                "key": trail.key if trail else None,
                "route": trail.route if trail else None,
                "prompt": ended.num_prompt_tokens,
                "output": ended.num_output_tokens,
                "cached": ended.num_cached_tokens,
                "arrival": times.arrival_time,
                "first_token": times.first_token_time,
                "finished": times.finished_time,
                "preemptions": times.num_preemptions,
                "reason": ended.answers[0].finish_reason,
            }
        )
    return found


def _trail(service: Service, request_id: str) -> Trail | None:
    return service.trails.of(request_id) or service.trails.of(request_id.rsplit("#", 1)[0])


def _error(trail: Trail) -> dict[str, Any]:
    return {"time": trail.began, "error": trail.error, **trail.line()}
