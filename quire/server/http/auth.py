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
from quire.server.http.trail import trail_of

OPEN_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/health"})
# The dashboard's page asks for a key itself; it is the same for everybody and knows nothing.
OPEN_FOLDER = "/dashboard/static/"
DOOR = "/dashboard/door"
OPEN_PAGES = frozenset({"/dashboard", DOOR})
LACKS_KEY = "quire.lacks_key"  # in the scope of a request that an open page makes
NAME_MARK = " # "  # between a key and its name


def load_keys(config: ServeConfig) -> list[str]:
    """The keys of the options, the key file and QUIRE_API_KEY, each with its name behind " # " if it has one.

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
    if any(not key.partition(NAME_MARK)[0].strip() for key in keys):
        raise ConfigError("an API key is empty (api_key, api_key_file or QUIRE_API_KEY)", "api_key")
    return keys


def name_keys(keys: Iterable[str]) -> list[tuple[str, str]]:
    """Each key with its name, which logs and metrics know it by: its own, or its number."""
    found = []
    for number, entry in enumerate(keys, 1):
        key, _, name = entry.partition(NAME_MARK)
        found.append((key.strip(), name.strip() or f"key-{number}"))
    return found


class ApiKeyMiddleware:
    """Lets a request through only with a known key, whatever its path, unless the path is in OPEN_PATHS.

    Keys are kept and compared as SHA-256 digests in constant time, all of them for every request, so neither the
    time taken nor a memory dump tells a key.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        named = name_keys(keys)
        self._digests = [hashlib.sha256(key.encode()).digest() for key, _ in named]
        self._names = [name for _, name in named]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_key = scope["type"] != "lifespan" and self._has_key(scope)
        if scope["type"] == "lifespan" or has_key or self._is_open(scope):
            scope[LACKS_KEY] = not has_key
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
        if scope["type"] != "http":
            return False
        path = scope["path"]
        is_page = path in OPEN_PAGES or (path.startswith(OPEN_FOLDER) and ".." not in path)
        return path in OPEN_PATHS or (is_page and scope["method"] in ("GET", "HEAD"))

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, token = _only(scope, b"authorization").partition(b" ")
        given = [token if scheme.lower() == b"bearer" else b"", _only(scope, b"x-api-key")]
        digests = [hashlib.sha256(key.strip()).digest() for key in given]
        matches = [hmac.compare_digest(digest, known) for digest in digests for known in self._digests]
        found = [at for at, matched in enumerate(matches) if matched]
        if found:
            trail_of(scope).key = self._names[found[0] % len(self._names)]
        return bool(found)


def _only(scope: Scope, name: bytes) -> bytes:
    """The value of a header that came once; empty otherwise (no key is empty)."""
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else b""
