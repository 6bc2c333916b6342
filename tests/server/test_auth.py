"""Deny by default: every route of the table, every method, unless it is one of the four probes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from quire.config.serve import ServeConfig
from quire.foundation.errors import ConfigError
from quire.server.app import ROUTERS
from quire.server.http.auth import OPEN_PATHS, load_keys
from tests.server.conftest import Served, echo_server

KEYS = ("key-one", "key-two")
ROUTES = [
    (method, route.path.replace("{name:path}", "echo"))
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in sorted(route.methods)
]


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with echo_server(keys=KEYS, enable_docs=True) as served:
        yield served


def test_there_are_routes_to_walk() -> None:
    assert {"/v1/completions", "/v1/chat/completions", "/metrics", "/tokenize"} <= {path for _, path in ROUTES}


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nowhere")])
def test_every_route_needs_a_key(locked: Served, method: str, path: str) -> None:
    bare = locked.client.request(method, path)
    if path in OPEN_PATHS:
        assert bare.status_code == 200
        return
    assert bare.status_code == 401
    if method == "HEAD":
        return
    kind = "authentication_error" if path.startswith("/v1/messages") else "AuthenticationError"
    assert bare.json()["error"]["type"] == kind
    assert bare.headers["www-authenticate"] == "Bearer"
    with_key = locked.client.request(method, path, headers={"Authorization": "Bearer key-two"})
    assert with_key.status_code != 401
    assert locked.client.request(method, path, headers={"x-api-key": "key-two"}).status_code != 401
    assert locked.client.request(method, path, headers={"x-api-key": "key"}).status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "/livez/",
        "//livez",
        "/livez/../v1/models",
        "/LIVEZ",
        "/livez%2f..%2fv1/models",
        "/v1/models?x=/livez",
        "/./livez",
    ],
)
def test_no_spelling_of_a_path_opens_a_door(locked: Served, path: str) -> None:
    import http.client

    connection = http.client.HTTPConnection(*locked.address)  # sends the path as it is
    connection.request("GET", path)
    assert connection.getresponse().status == 401
    connection.close()


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer key-on",
        "Bearer key-onex",
        "Bearer KEY-ONE",
        "Basic key-one",
        "key-one",
        "Bearer key-one key-two",
    ],
)
def test_wrong_keys(locked: Served, header: str) -> None:
    assert locked.client.get("/v1/models", headers={"Authorization": header}).status_code == 401


def test_two_authorization_headers_are_refused(locked: Served) -> None:
    headers = httpx.Headers([("Authorization", "Bearer key-one"), ("Authorization", "Bearer no")])
    assert locked.client.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("key", KEYS)
def test_each_key_works(locked: Served, key: str) -> None:
    assert locked.client.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200


def test_a_websocket_is_refused(locked: Served) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
    assert locked.client.get("/v1/realtime", headers=headers).status_code == 401


def test_keys_come_from_options_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the tests\nfrom-file\n\nsecond\n")
    monkeypatch.setenv("QUIRE_API_KEY", "from-env")
    config = ServeConfig(api_key=["from-option"], api_key_file=str(file))
    assert load_keys(config) == ["from-option", "from-file", "second", "from-env"]


@pytest.mark.parametrize("content", [None, "", "# only a comment\n"])
def test_a_key_file_without_keys_is_an_error_and_not_an_open_door(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        load_keys(ServeConfig(api_key_file=str(file)))


def test_an_empty_key_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "")
    with pytest.raises(ConfigError, match="empty"):
        load_keys(ServeConfig())


def test_cors_is_off_unless_asked_for(echo: Served) -> None:
    response = echo.client.get("/version", headers={"Origin": "https://example.org"})
    assert "access-control-allow-origin" not in response.headers


def test_a_preflight_needs_no_key_but_the_request_does() -> None:
    with echo_server(keys=KEYS, allowed_origins=["https://example.org"]) as served:
        headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
        preflight = served.client.options("/v1/completions", headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://example.org"
        assert served.client.post("/v1/completions", headers=headers, json={"prompt": "a"}).status_code == 401


@pytest.mark.parametrize("given", ["/llm", "llm", "/llm/"])
def test_behind_a_proxy_a_prefix_may_be_cut_off_or_not(given: str) -> None:
    """The limits of routes, keys, open pages and counts are the same either way."""
    options = {"root_path": given, "max_body_bytes": 1000, "enable_docs": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with echo_server(keys=KEYS, **options) as served:
            for prefix in ("", "/llm"):
                key = {"Authorization": "Bearer key-one"}
                assert served.client.get(f"{prefix}/livez").status_code == 200
                assert served.client.get(f"{prefix}/dashboard").status_code == 200
                assert served.client.get(f"{prefix}/v1/models").status_code == 401
                assert served.client.get(f"{prefix}/v1/models", headers=key).status_code == 200
                assert served.client.head(f"{prefix}/v1/models", headers=key).status_code == 200
                long = served.client.post(f"{prefix}/v1/completions", headers=key, json={"prompt": "a" * 1000})
                assert long.status_code == 413
                upload = {"file": ("a.jsonl", b"{}" * 1000), "purpose": (None, "other")}
                assert served.client.post(f"{prefix}/v1/files", headers=key, files=upload).status_code == 400
                assert '"/llm/openapi.json"' in served.client.get(f"{prefix}/docs", headers=key).text.replace("'", '"')
            assert served.client.get("/llmx/v1/models", headers=key).status_code == 404
            counted = served.client.get("/metrics", headers=key).text
            assert 'handler="/v1/models",method="GET",status="2xx"} 2.0' in counted
