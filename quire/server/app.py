"""The application: routes, and around them the limits and the keys."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

import quire
from quire.server import invocations
from quire.server.anthropic import endpoints as anthropic
from quire.server.batches import endpoints as openai_batches
from quire.server.batches import files as openai_files
from quire.server.batches.queue import BatchQueue
from quire.server.dashboard import endpoints as dashboard
from quire.server.http import errors
from quire.server.http.auth import ApiKeyMiddleware, name_keys
from quire.server.http.body import CloseLongBodies
from quire.server.http.entry import ENGINE_ROUTES, enter
from quire.server.http.limits import BodyLimitMiddleware
from quire.server.http.metrics import CountingMiddleware, HttpMetrics
from quire.server.http.openapi_document import openapi_document
from quire.server.openai import chat as openai_chat
from quire.server.openai import completions as openai_completions
from quire.server.openai import models as openai_models
from quire.server.operations import adapters, development, front_page, profiling
from quire.server.operations import probes as ops
from quire.server.pooling import classification, scoring
from quire.server.pooling import cohere as cohere_embed
from quire.server.pooling import embeddings as openai_embeddings
from quire.server.responses import compact as openai_responses_compact
from quire.server.responses import endpoints as openai_responses
from quire.server.responses.store import ResponseStore
from quire.server.service import Service
from quire.server.tokens import generate as token_generate
from quire.server.tokens import generative_scoring, rendering, tokenization

ROUTERS = (
    ops.router,
    front_page.router,
    openai_models.router,
    openai_completions.router,
    openai_chat.router,
    openai_responses.router,
    openai_responses_compact.router,
    anthropic.router,
    token_generate.router,
    rendering.router,
    generative_scoring.router,
    tokenization.router,
    openai_embeddings.router,
    classification.router,
    scoring.router,
    cohere_embed.router,
    openai_files.router,
    openai_batches.router,
    invocations.router,
)
# Refused by a model that makes vectors.
GENERATING = (
    openai_completions.router,
    openai_chat.router,
    openai_responses.router,
    openai_responses_compact.router,
    anthropic.router,
    token_generate.router,
    rendering.router,
    generative_scoring.router,
)


def build_app(service: Service) -> FastAPI:
    """The routes of one service, without keys, limits and CORS."""
    app = FastAPI(
        title="Quire",
        version=quire.__version__,
        docs_url="/docs" if service.serve.enable_docs else None,
        openapi_url="/openapi.json" if service.serve.enable_docs else None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.batches = BatchQueue(service, app)
    app.state.responses = ResponseStore(service.serve.response_store_bytes // len(service.counters.pages))
    app.state.peers = None
    errors.install(app)
    app.add_middleware(CloseLongBodies)
    app.openapi = openapi_document(app)  # type: ignore[method-assign]
    for router in routers_of(service):
        first = [Depends(_check_generates)] if router in GENERATING else []
        app.include_router(router, dependencies=[*first, Depends(enter)])
    return app


def routers_of(service: Service) -> list[APIRouter]:
    """Those that the options ask for among them."""
    routers = list(ROUTERS)
    if service.serve.allow_runtime_lora_updating:
        routers.append(adapters.router)
    if service.serve.enable_dashboard:
        routers.append(dashboard.router)
    if service.serve.server_dev_mode:
        routers.append(development.router)
    if service.config.observe.profiler_config:
        routers.append(profiling.router)
    return routers


async def _check_generates(request: Request) -> None:
    request.app.state.service.check_generates()


def _without_prefix(app: ASGIApp, prefix: str) -> ASGIApp:
    """Whether a proxy has cut the prefix off or not: everything inside sees paths without it."""
    raw = prefix.encode()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope["root_path"] = prefix
            if scope["path"] == prefix or scope["path"].startswith(prefix + "/"):
                scope["path"] = scope["path"].removeprefix(prefix) or "/"
                scope["raw_path"] = scope["raw_path"].removeprefix(raw) or b"/"
        await app(scope, receive, send)

    return answer


def _with_head(app: ASGIApp) -> ASGIApp:
    """HEAD is GET on every route that has none of its own; the HTTP server leaves the body out."""
    own = {
        route.path
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and "HEAD" in (route.methods or ())
    }

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD" and scope["path"] not in own
        await app({**scope, "method": "GET"} if is_head else scope, receive, send)

    return answer


def protect(app: ASGIApp, service: Service, keys: Iterable[str]) -> ASGIApp:
    """The app as it may be shown to the world.

    From the outside in: a proxy's prefix, what is counted, CORS (a browser's preflight carries no key), keys, body
    size, HEAD, routes.
    """
    serve = service.serve
    limits = {"/v1/files": serve.max_batch_file_bytes}
    outer: ASGIApp = BodyLimitMiddleware(_with_head(app), serve.max_body_bytes, limits)
    if keys := list(keys):
        outer = ApiKeyMiddleware(outer, keys)
    if serve.allowed_origins:
        outer = CORSMiddleware(
            outer,
            allow_origins=serve.allowed_origins,
            allow_credentials=serve.allow_credentials,
            allow_methods=serve.allowed_methods,
            allow_headers=serve.allowed_headers,
        )
    names = [name for _, name in name_keys(keys)]
    service.http_metrics = HttpMetrics(service.counters, routers_of(service), names)
    outer = CountingMiddleware(
        outer, service.http_metrics, service.trails,
        writes_log=serve.enable_access_log,
        find_tracing=lambda route: service.tracing if route in ENGINE_ROUTES else None,
    )  # fmt: skip
    return _without_prefix(outer, serve.prefix) if serve.prefix else outer
