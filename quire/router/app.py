"""The router as an application: its own routes, those for all servers, and all others for one of them."""

from __future__ import annotations

import hmac
import json
import time
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from quire.config.route import RouteConfig
from quire.foundation.errors import ConfigError
from quire.router.backend import Backend, check_url
from quire.router.choose import Chooser
from quire.router.everywhere import PATHS, Everywhere
from quire.router.fleet import Fleet
from quire.router.metrics import RouterMetrics
from quire.router.proxy import BrokenAnswerError, Proxy, reply_error, reply_json

_HERE = ("127.0.0.1", "::1")
_MOST_ADMIN_BYTES = 65536


class RouterApp:
    """One a process."""

    def __init__(self, config: RouteConfig) -> None:
        self._config = config
        chooser = Chooser(config)
        self.fleet = Fleet(config, chooser)
        self._metrics = RouterMetrics(lambda: self.fleet.backends)
        self._proxy = Proxy(config, self.fleet, chooser, self._metrics)
        self._everywhere = Everywhere(self.fleet, chooser, config.max_body_bytes)
        self._own = {
            "/livez": self._live,
            "/health": self._health,
            "/readyz": self._health,
            "/metrics": self._show_metrics,
            "/v1/models": self._models,
            "/load": self._load,
        }
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path.startswith("/router/"):
            await self._administer(scope, receive, send)
        elif scope["method"] == "GET" and path in self._own:
            await self._own[path](send)
        elif scope["method"] == "POST" and path in PATHS:
            await self._everywhere(scope, receive, send)
        else:
            try:
                await self._proxy(scope, receive, send)
            except BrokenAnswerError:
                return  # incomplete: the HTTP server closes the connection

    async def _live(self, send: Send) -> None:
        await reply_json(send, b"")

    async def _health(self, send: Send) -> None:
        if self.is_draining:
            await reply_error(send, 503, "the router is shutting down")
        elif not self.fleet.able:
            await reply_error(send, 503, "no server takes requests")
        else:
            await reply_json(send, b"")

    async def _show_metrics(self, send: Send) -> None:
        await reply_json(send, self._metrics.render(), kind="text/plain; version=0.0.4; charset=utf-8")

    async def _load(self, send: Send) -> None:
        await reply_json(send, {"server_load": sum(backend.in_flight for backend in self.fleet.backends)})

    async def _models(self, send: Send) -> None:
        """Of all servers that take requests, each model once."""
        found: dict[str, dict[str, object]] = {}
        for backend in self.fleet.able:
            for model in backend.models:
                found.setdefault(str(model.get("id")), model)
        await reply_json(send, {"object": "list", "data": list(found.values())})

    # -- for an operator -----------------------------------------------------------------------------------------

    def _is_allowed(self, scope: Scope) -> bool:
        if self._config.admin_key is None:
            return bool(scope["client"]) and scope["client"][0] in _HERE
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, f"Bearer {self._config.admin_key}".encode())

    async def _administer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_allowed(scope):
            await reply_error(send, 401, "/router/* needs the router's admin_key, or a client on its own machine")
            return
        what = scope["method"], scope["path"]
        if what == ("GET", "/router/backends"):
            await reply_json(send, {"backends": [backend.described() for backend in self.fleet.backends]})
            return
        if what not in (("POST", "/router/backends"), ("DELETE", "/router/backends"), ("POST", "/router/drain")):
            await reply_error(send, 404, "GET, POST and DELETE /router/backends, POST /router/drain")
            return
        try:
            url = check_url(await _url_of(scope, receive))
        except ConfigError as error:
            await reply_error(send, 400, str(error))
            return
        if what == ("POST", "/router/backends"):
            await reply_json(send, self.fleet.add(url).described())
            return
        backend = self.fleet.find(url)
        if backend is None:
            await reply_error(send, 404, f"there is no backend {url}")
            return
        await self._send_away(what[0], backend, send)

    async def _send_away(self, method: str, backend: Backend, send: Send) -> None:
        if method == "DELETE":
            self.fleet.remove(backend)
        else:
            backend.is_draining = True
        await reply_json(send, backend.described() | {"at": time.time()})


async def _url_of(scope: Scope, receive: Receive) -> str:
    """Of the query or the body. Raises ConfigError."""
    if named := parse_qs(scope["query_string"].decode("latin-1")).get("url"):
        return str(named[0])
    body, more = b"", True
    while more and len(body) < _MOST_ADMIN_BYTES:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    try:
        return str(json.loads(body)["url"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError('say which: {"url": "http://HOST:PORT"}', "url") from None
