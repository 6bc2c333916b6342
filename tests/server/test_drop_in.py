"""What clients, dashboards and scripts of other engines ask of a server."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from quire.config.cache import CacheConfig
from quire.server.app import ROUTERS
from quire.server.http.metrics import NOT_COUNTED
from tests.server.conftest import Served, echo_server
from tests.server.echo_llm import EchoLLM
from tests.server.process import ServerProcess, server_process

KEY = "sesame"


def samples(client: httpx.Client) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, the values of its labels by the labels' names) → value."""
    text = client.get("/metrics", headers={"x-api-key": KEY}).text
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    names = ["echo", "org/echo", "third"]
    with echo_server(EchoLLM(served_model_name=names), keys=(KEY,), max_body_bytes=2000) as found:
        found.client.headers["authorization"] = f"Bearer {KEY}"
        yield found


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0) as client:
        yield client


# Models


def test_anthropics_client_lists_models(claude: anthropic.Anthropic, served: Served) -> None:
    page = claude.models.list()
    assert [model.id for model in page.data] == served.service.names
    assert not page.has_more
    assert (page.first_id, page.last_id) == ("echo", "third")
    first = page.data[0]
    assert (first.type, first.display_name, first.max_input_tokens) == ("model", "echo", 4096)
    assert int(first.created_at.timestamp()) == served.service.created
    assert claude.models.retrieve("org/echo").id == "org/echo"


def test_anthropics_client_goes_through_pages(claude: anthropic.Anthropic) -> None:
    assert [model.id for model in claude.models.list(limit=1)] == ["echo", "org/echo", "third"]
    back = claude.models.list(limit=1, before_id="third")
    assert ([model.id for model in back.data], back.has_more) == (["org/echo"], True)


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 1001}, {"after_id": "none"}, {"before_id": "none"}])
def test_pages_that_cannot_be(claude: anthropic.Anthropic, query: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError, match=next(iter(query))):
        claude.models.list(**query)


def test_refusals_have_the_shape_of_who_asks(claude: anthropic.Anthropic, served: Served) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.models.retrieve("nobody")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with (
        anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as locked,
    ):
        stranger.models.list()
    assert locked.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    assert served.client.get("/v1/models/nobody").json()["error"]["type"] == "NotFoundError"


def test_openais_card_has_permissions(served: Served) -> None:
    cards = served.client.get("/v1/models", headers={"x-api-key": KEY}).json()["data"]
    assert [card["id"] for card in cards] == served.service.names
    (permission,) = cards[0]["permission"]
    assert permission["object"] == "model_permission"
    assert permission["allow_sampling"] is True
    assert permission["allow_fine_tuning"] is False


# The front page


def test_the_front_page(served: Served) -> None:
    page = served.client.get("/", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert "org/echo" in page.text
    assert f"{served.url}/v1" in page.text
    assert "src=" not in page.text, "nothing is loaded from elsewhere"
    assert len(page.content) < 4000
    for link in page.text.split('href="')[1:]:
        assert served.client.get(link.split('"')[0]).status_code == 200
    found = served.client.get("/", headers={"accept": "application/json"}).json()
    assert (found["name"], found["models"]) == ("quire", served.service.names)


# Metrics


def test_every_option_of_the_cache_is_a_label(served: Served) -> None:
    text = served.client.get("/metrics").text
    (sample,) = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:cache_config_info"
    ]
    wanted = {field.name for field in fields(CacheConfig)} | {"engine", "cache_dtype", "num_gpu_blocks"}
    assert wanted <= sample.labels.keys()
    assert (sample.value, sample.labels["block_size"], sample.labels["num_gpu_blocks"]) == (1, "16", "257")


def test_the_longest_of_several_answers_is_observed(served: Served) -> None:
    name = ("vllm:request_max_num_generation_tokens_sum", ("0", "echo"))
    before = samples(served.client)
    body = {"prompt": "ab", "max_tokens": 5, "n": 3, "temperature": 1}
    for is_stream in (False, True):
        assert served.client.post("/v1/completions", json={**body, "stream": is_stream}).status_code == 200
    after = samples(served.client)
    assert after[name] - before[name] == 5 + 5
    tokens = ("vllm:request_generation_tokens_sum", ("0", "echo"))
    assert after[tokens] - before[tokens] == 15 + 15


CASES: list[tuple[str, str, dict[str, Any], tuple[str, str, str]]] = [
    ("GET", "/v1/models", {}, ("/v1/models", "GET", "2xx")),
    ("GET", "/v1/models/echo", {}, ("/v1/models/{name:path}", "GET", "2xx")),
    ("GET", "/v1/models/nobody", {}, ("/v1/models/{name:path}", "GET", "4xx")),
    ("GET", "/v1/models", {"headers": {"authorization": ""}}, ("/v1/models", "GET", "4xx")),
    ("GET", "/v1/nowhere", {}, ("none", "GET", "4xx")),
    ("TRACE", "/v1/nowhere", {}, ("none", "OTHER", "4xx")),
    ("DELETE", "/v1/models", {}, ("/v1/models", "OTHER", "4xx")),
    ("POST", "/v1/completions", {"json": {"prompt": "a", "max_tokens": 1}}, ("/v1/completions", "POST", "2xx")),
    ("POST", "/v1/completions", {"json": {"prompt": "a", "max_tokens": -1}}, ("/v1/completions", "POST", "4xx")),
    ("POST", "/v1/completions", {"content": b"x" * 3000}, ("/v1/completions", "POST", "4xx")),
]


@pytest.mark.parametrize(("method", "path", "options", "labels"), CASES)
def test_each_request_is_counted_once(
    served: Served, method: str, path: str, options: dict[str, Any], labels: tuple[str, str, str]
) -> None:
    before = samples(served.client)
    reply = served.client.request(method, path, **options)
    assert f"{reply.status_code // 100}xx" == labels[2]
    after = samples(served.client)

    def gained(name: str) -> dict[tuple[str, ...], float]:
        found = {key: after[key] - before.get(key, 0.0) for key in after if key[0] == name}
        return {key[1]: value for key, value in found.items() if value}

    assert gained("http_requests_total") == {labels: 1}
    assert gained("http_request_duration_seconds_count") == {labels[:2]: 1}
    assert gained("http_request_duration_highr_seconds_count") == {(): 1}
    assert gained("http_request_size_bytes_count") == {labels[:1]: 1}
    assert gained("http_response_size_bytes_sum") == ({labels[:1]: len(reply.content)} if reply.content else {})


def test_a_stream_is_counted_when_it_ends(served: Served) -> None:
    body = {"prompt": "abc", "max_tokens": 20, "stream": True}
    before = samples(served.client)
    reply = served.client.post("/v1/completions", json=body)
    after = samples(served.client)
    key = ("http_response_size_bytes_sum", ("/v1/completions",))
    assert after[key] - before.get(key, 0.0) == len(reply.content)


def test_every_route_has_a_handler_of_its_own_or_is_a_probe(served: Served) -> None:
    metrics = served.service.http_metrics
    assert metrics is not None
    for router in ROUTERS:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            handler = metrics.handler_of(route.path.replace("{name:path}", "a/b").replace("{", "").replace("}", ""))
            assert (handler is None) == (route.path in NOT_COUNTED)
            assert handler is None or (handler.name == route.path and route.methods <= {*handler.methods})
    before = samples(served.client)
    for path in NOT_COUNTED:
        served.client.get(path)
    after = samples(served.client)
    assert {k: v for k, v in before.items() if k[0] == "http_requests_total"} == {
        k: v for k, v in after.items() if k[0] == "http_requests_total"
    }


# A real engine behind it


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def real(traces: Path) -> Iterator[ServerProcess]:
    options = ["--port", "0", "--device", "cpu", "--max-model-len", "512", "--server-dev-mode", "--hf-token", "hush-1"]
    options += ["--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir", str(traces)]
    options += ["--batch-dir", str(traces / "batches")]
    with server_process("quire.cli.main", "serve", *options, QUIRE_API_KEY=KEY) as server:
        yield server


@pytest.fixture
def client(real: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url, headers={"x-api-key": KEY}, timeout=60) as found:
        yield found


def complete(client: httpx.Client) -> int:
    """Tokens of the prompt that came from the cache."""
    body = {"prompt": "word " * 60, "max_tokens": 2, "temperature": 0}
    cached: int = client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_the_prefix_cache_is_reset(client: httpx.Client) -> None:
    complete(client)
    assert complete(client) > 0
    for query in ({}, {"reset_running_requests": "true"}):
        assert client.post("/reset_prefix_cache", params=query).json() == {"success": True}
        assert complete(client) == 0
    refused = client.post("/reset_prefix_cache", params={"reset_external": "true"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reset_external")


def test_server_info_tells_all_but_secrets(client: httpx.Client) -> None:
    text = client.get("/server_info").text
    assert "config.model.max_model_len = 512" in text
    found = client.get("/server_info", params={"config_format": "json"}).json()
    assert found["resolved"]["architecture"] == "Qwen3ForCausalLM"
    assert found["resolved"]["quantization"] is None
    assert found["worker"]["num_blocks"] > 0
    for secret in (KEY, "hush-1"):
        assert secret not in text
        assert secret not in json.dumps(found)
    assert client.get("/server_info", params={"config_format": "xml"}).status_code == 400


def test_a_profile_is_written(client: httpx.Client, traces: Path) -> None:
    early = client.post("/stop_profile")
    assert (early.status_code, "start_profile" in early.json()["error"]["message"]) == (400, True)
    assert client.post("/start_profile").json() == {"success": True}
    assert client.post("/start_profile").status_code == 400
    complete(client)
    path = Path(client.post("/stop_profile").json()["path"])
    assert path.parent == traces
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert "aten::linear" in names or "aten::mm" in names or "aten::addmm" in names, sorted(map(str, names))[:50]


def test_without_the_options_there_is_no_such_route(served: Served) -> None:
    for method, path in (("POST", "/reset_prefix_cache"), ("GET", "/server_info"), ("POST", "/start_profile")):
        assert served.client.request(method, path).status_code == 404
