"""A server at the other end of a URL, by the standard library alone: what `chat`, `complete` and `top` ask."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.parse
from collections.abc import Iterator
from typing import Any

from quire.foundation.error_codes import entries
from quire.foundation.errors import InputError


class Server:
    """url: with or without `/v1`. Raises InputError for one that cannot be."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"url must look like http://localhost:8000/v1, got {url!r}", "url")
        self._url = parts
        self.api = parts.path.rstrip("/") or "/v1"
        self.root = self.api.removesuffix("/v1")
        key = api_key or os.environ.get("QUIRE_API_KEY") or os.environ.get("OPENAI_API_KEY")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def __str__(self) -> str:
        return self._url.geturl()

    def send(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """path: the whole of it.

        Raises InputError if nobody answers, or with anything but 200 (its code is then the server's), or for text that
        no server can be sent.
        """
        try:
            content = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InputError("the text is not valid UTF-8", "prompt") from None
        host, port = self._url.hostname or "", self._url.port
        connection: http.client.HTTPConnection
        if self._url.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, context=ssl.create_default_context())
        else:
            connection = http.client.HTTPConnection(host, port)
        try:
            connection.request(method, path, content, self._headers)
            response = connection.getresponse()
        except OSError as error:
            raise InputError(f"no server answers at {self}: {error}", "url") from None
        if response.status != 200:
            refused = InputError(f"the server answered {response.status}: {_message(response.read())}", "url")
            code = response.getheader("x-error-code")
            refused.code = code if code in entries() else None
            raise refused
        return response

    def first_model(self) -> str:
        return str(json.loads(self.send("GET", self.api + "/models").read())["data"][0]["id"])


def read_events(lines: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream. Raises InputError for one that is an error."""
    for line in lines:
        field, _, data = line.strip().partition(b":")
        if field != b"data" or not data.strip():
            continue
        if data.strip() == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise InputError(f"the server gave up: {event['error'].get('message')}", "url")
        yield event


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
