"""API keys. Deny by default: a route is open only if it is named here."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.serve import ServeConfig
from quire.foundation.errors import ConfigError
from quire.server.http.errors import error_response, path_of

OPEN_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/health"})


def load_keys(config: ServeConfig) -> list[str]:
    """The keys of the options, the key file and QUIRE_API_KEY.

    Raises ConfigError if the file cannot be read, holds no key, or a key is empty.
    """
    keys = list(config.api_key)
    if config.api_key_file:
        try:
            lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {config.api_key_file!r} cannot be read: {error}", "api_key_file") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError(f"api_key_file {config.api_key_file!r} holds no key", "api_key_file")
        keys += found
    if "QUIRE_API_KEY" in os.environ:
        keys.append(os.environ["QUIRE_API_KEY"])
    if any(not key.strip() for key in keys):
        raise ConfigError("an API key is empty (api_key, api_key_file or QUIRE_API_KEY)", "api_key")
    return keys


class ApiKeyMiddleware:
    """Lets a request through only with a known key, whatever its path, unless the path is in OPEN_PATHS.

    Keys are kept and compared as SHA-256 digests in constant time, all of them for every request, so neither the
    time taken nor a memory dump tells a key.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], root_path: str = "") -> None:
        self.app = app
        self.root_path = root_path.rstrip("/")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope) or self._has_key(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        message = "a valid API key is needed: send the header 'Authorization: Bearer <key>' or 'x-api-key: <key>'"
        headers = {"www-authenticate": "Bearer"}
        response = error_response(401, message, headers=headers, path=path_of(scope))
        await response(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and scope["path"].removeprefix(self.root_path) in OPEN_PATHS

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, token = _only(scope, b"authorization").partition(b" ")
        given = [token if scheme.lower() == b"bearer" else b"", _only(scope, b"x-api-key")]
        digests = [hashlib.sha256(key.strip()).digest() for key in given]
        matches = [hmac.compare_digest(digest, known) for digest in digests for known in self._digests]
        return any(matches)


def _only(scope: Scope, name: bytes) -> bytes:
    """The value of a header that came once; empty otherwise (no key is empty)."""
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else b""
