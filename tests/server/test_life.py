"""Clients that go away, engines that hang or die, probes and metrics."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Served, echo_server
from tests.server.echo_llm import EchoLLM
from tests.server.process import send_raw

PATHS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


def open_request(served: Served, path: str = "/v1/completions", **fields: object) -> socket.socket:
    return send_raw(served.url, path, **{**PATHS[path], "max_tokens": 3000, **fields})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_ends_its_request(path: str, stream: bool, n: int) -> None:
    with echo_server(EchoLLM(delay=0.005)) as served:
        connection = open_request(served, path, stream=stream, n=n)
        assert served.wait_until(lambda: len(served.llm.running) == 1)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
        assert served.wait_until(lambda: not served.llm.running)
        assert len(served.llm.aborted) == 1
        assert served.wait_until(lambda: served.client.get("/load").json() == {"server_load": 0})


def test_all_prompts_of_a_request_end_with_it() -> None:
    with echo_server(EchoLLM(delay=0.005)) as served:
        connection = open_request(served, prompt=["a", "b", "c"], stream=True)
        assert served.wait_until(lambda: len(served.llm.running) == 3)
        connection.close()
        assert served.wait_until(lambda: not served.llm.running)
        assert len(served.llm.aborted) == 3


def test_one_refused_prompt_ends_its_siblings() -> None:
    with echo_server(EchoLLM(delay=0.005)) as served:
        response = served.client.post("/v1/completions", json={"prompt": ["a", "b", ""], "max_tokens": 3000})
        assert response.status_code == 400
        assert served.wait_until(lambda: not served.llm.running)


def test_a_storm_of_disconnects_leaves_nothing_behind() -> None:
    with echo_server(EchoLLM(delay=0.002)) as served:
        for round_ in range(20):
            connections = [open_request(served, stream=bool(i % 2)) for i in range(16)]
            time.sleep(0.002 * (round_ % 4))
            for connection in connections:
                connection.close()
        assert served.wait_until(
            lambda: served.client.get("/load").json()["server_load"] == 0 and not served.llm.running
        )
        assert served.client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_keep_alive_survives_a_streamed_reply(echo: Served) -> None:
    with httpx.Client(base_url=echo.url, limits=httpx.Limits(max_connections=1)) as client:
        for _ in range(5):
            assert client.post("/v1/completions", json={"prompt": "a", "stream": True}).text.endswith("[DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_dies_before_the_first_token(stream: bool) -> None:
    llm = EchoLLM()
    llm.die()
    with echo_server(llm) as served:
        response = served.client.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert response.status_code == 503
        assert "the worker was killed" in response.json()["error"]["message"]
        assert served.client.get("/health").status_code == 503
        assert served.client.get("/readyz").status_code == 503
        assert served.client.get("/livez").status_code == 200


def test_the_engine_dies_in_a_stream() -> None:
    with (
        echo_server(EchoLLM(delay=0.01)) as served,
        served.client.stream(
            "POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 3000}
        ) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        served.llm.die()
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == 503
    assert rest[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_of_ours_is_500_and_harms_nobody(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    with echo_server() as served:
        monkeypatch.setattr(served.llm, "_answer", lambda *_: 1 / 0)
        response = served.client.post("/v1/completions", json={"prompt": "a", "stream": stream})
        assert response.status_code == 500
        assert "division" not in response.text
        monkeypatch.undo()
        assert served.client.post("/v1/completions", json={"prompt": "a", "stream": stream}).status_code == 200


def test_an_engine_that_hangs_is_not_ready() -> None:
    llm = EchoLLM()
    llm.frozen = True
    with echo_server(llm, hang_timeout=0.05) as served:
        connection = open_request(served)
        assert served.wait_until(lambda: bool(llm.running))
        assert served.wait_until(lambda: served.client.get("/readyz").status_code == 503)
        for path in ("/readyz", "/health", "/ping"):
            assert "hangs" in served.client.get(path).json()["error"]["message"], path
        assert served.client.get("/livez").status_code == 200
        llm.frozen = False
        assert served.wait_until(lambda: served.client.get("/readyz").status_code == 200)
        connection.close()


def test_a_client_that_reads_slowly_is_no_hang() -> None:
    with echo_server(hang_timeout=0.1) as served:
        connection = open_request(served, stream=True, n=16)  # more than socket buffers hold
        assert served.wait_until(lambda: bool(served.llm.running))
        time.sleep(0.5)
        assert served.client.get("/load").json() == {"server_load": 16}
        assert served.client.get("/readyz").status_code == 200
        connection.close()
        assert served.wait_until(lambda: not served.llm.running)


def test_an_idle_engine_does_not_hang() -> None:
    with echo_server(hang_timeout=0.01) as served:
        time.sleep(0.05)
        assert served.client.get("/readyz").status_code == 200


def test_probes_answer_while_the_model_loads() -> None:
    with echo_server() as served:
        engine, served.service.engine = served.service.engine, None
        status = {path: served.client.get(path).status_code for path in ("/livez", "/startupz", "/readyz", "/health")}
        assert status == {"/livez": 200, "/startupz": 503, "/readyz": 503, "/health": 503}
        refused = served.client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        served.service.engine = engine
        assert served.client.get("/startupz").status_code == 200


def test_a_full_queue_is_503_with_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    with echo_server() as served:
        monkeypatch.setattr(served.llm, "refuse_with", "queue_full")
        for stream in (False, True):
            response = served.client.post("/v1/completions", json={"prompt": "a", "stream": stream})
            assert response.status_code == 503
            assert response.headers["retry-after"].isdigit()


def metrics(served: Served) -> dict[str, float]:
    families = text_string_to_metric_families(served.client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    labels = ("finished_reason", "le")
    return {s.name + "".join(f"[{s.labels[k]}]" for k in labels if k in s.labels): s.value for s in samples}


def test_metrics_count_what_happened() -> None:
    with echo_server(EchoLLM(delay=0.001, served_model_name=["echo"])) as served:
        served.client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 6, "stream": True})
        served.client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4, "n": 2})
        numbers = metrics(served)
        assert 'model_name="echo"' in served.client.get("/metrics").text
    assert numbers["vllm:request_success_total[length]"] == 3
    assert numbers["vllm:request_prompt_tokens_sum"] == 10
    assert numbers["vllm:request_generation_tokens_sum"] == 14
    assert numbers["vllm:time_to_first_token_seconds_count"] == 2
    assert numbers["vllm:inter_token_latency_seconds_count"] == 5 + 6
    assert numbers["vllm:e2e_request_latency_seconds_count"] == 2
    assert numbers["vllm:num_requests_running"] == 0
    assert numbers["vllm:request_params_n_bucket[1.0]"] == 1
    assert numbers["vllm:request_params_n_bucket[+Inf]"] == 2
    assert numbers["process_resident_memory_bytes"] > 0
