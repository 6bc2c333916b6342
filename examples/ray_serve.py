"""OpenAI's API on Ray Serve: replicas on a cluster, more of them under load, each a whole engine.

    pip install 'quire[server,ray]' 'ray[serve]'
    serve run examples.ray_serve:deployment model=Qwen/Qwen3-0.6B gpus=1
    curl http://127.0.0.1:8000/v1/models

Every route of `quire serve` is there. Ray Serve spreads requests by load alone; `quire route` before several
`quire serve` also knows where a prompt is cached.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from ray import serve

from quire.config.engine import EngineConfig
from quire.config.serve import ServeConfig
from quire.frontend.async_engine import AsyncLLM
from quire.server.app import build_app
from quire.server.service import Service


def build(options: dict[str, Any]) -> FastAPI:
    """The app that a replica serves. Its engine starts and ends with it."""
    config = EngineConfig.from_flat(**options)
    service = Service(config, ServeConfig())
    app = build_app(service)

    @contextlib.asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        engine = await AsyncLLM.start(config, serving=True)
        service.attach(engine)
        try:
            yield
        finally:
            engine.shutdown()

    app.router.lifespan_context = life
    return app


def deployment(arguments: dict[str, str]) -> Any:
    """What `serve run` deploys. arguments: model, gpus, replicas, device."""
    options = {name: arguments[name] for name in ("model", "device") if name in arguments}
    gpus = float(arguments.get("gpus", 0))

    @serve.deployment(
        ray_actor_options={"num_gpus": gpus, "num_cpus": 1},
        autoscaling_config={
            "min_replicas": 1,
            "max_replicas": int(arguments.get("replicas", 1)),
            "target_ongoing_requests": 64,
        },
        max_ongoing_requests=1024,
        graceful_shutdown_timeout_s=150,
        health_check_timeout_s=30,
    )
    @serve.ingress(lambda: build(options))
    class Server:
        pass

    return Server.bind()
