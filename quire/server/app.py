"""The application: routes, and around them the limits and the keys."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import quire
from quire.server import (
    anthropic,
    errors,
    openai_chat,
    openai_completions,
    openai_models,
    openai_responses,
    ops,
    tokenization,
)
from quire.server.auth import ApiKeyMiddleware
from quire.server.limits import BodyLimitMiddleware
from quire.server.openai_responses_store import ResponseStore
from quire.server.service import Service

ROUTERS = (
    ops.router,
    openai_models.router,
    openai_completions.router,
    openai_chat.router,
    openai_responses.router,
    anthropic.router,
    tokenization.router,
)


def build_app(service: Service) -> FastAPI:
    """The routes of one service, without keys, limits and CORS."""
    app = FastAPI(
        title="Quire",
        version=quire.__version__,
        docs_url="/docs" if service.serve.enable_docs else None,
        openapi_url="/openapi.json" if service.serve.enable_docs else None,
        redoc_url=None,
        root_path=service.serve.root_path,
    )
    app.state.service = service
    app.state.responses = ResponseStore(service.serve.response_store_bytes)
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    return app


def protect(app: FastAPI, service: Service, keys: Iterable[str]) -> ASGIApp:
    """The app as it may be shown to the world.

    From the outside in: CORS (a browser's preflight carries no key), keys, body size, routes.
    """
    serve, wrapped = service.serve, BodyLimitMiddleware(app, service.serve.max_body_bytes)
    outer: ASGIApp = wrapped
    if keys := list(keys):
        outer = ApiKeyMiddleware(outer, keys, serve.root_path)
    if serve.allowed_origins:
        outer = CORSMiddleware(
            outer,
            allow_origins=serve.allowed_origins,
            allow_credentials=serve.allow_credentials,
            allow_methods=serve.allowed_methods,
            allow_headers=serve.allowed_headers,
        )
    return outer
