"""Spans and lines of requests, from a real server to a collector and to its log."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.cli.main import main
from quire.foundation.errors import ConfigError
from quire.server.tracing import check
from tests.observe.otlp_receiver import Receiver, grpc_receiver, otlp_receiver
from tests.server.process import ServerProcess, server_process, wait_until
from tests.server.several.test_front_ends import metrics
from tests.server.test_restarts import CORE, processes

pytest.importorskip("opentelemetry.sdk", reason="the extra tracing is not installed")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"authorization": "Bearer sesame"}
STREAMS, TOKENS = 6, 250
ASKED = {"messages": [{"role": "user", "content": "Tell me a story. " * 40}], "max_tokens": 8, "temperature": 0.5}


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[ServerProcess, Receiver]]:
    with otlp_receiver() as receiver:
        options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--otlp-traces-endpoint", receiver.url]
        options += ["--max-prefill-chunk", "64", "--enable-access-log", "--api-key", "sesame # ann"]
        environment = {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "QUIRE_LOG_JSON": "1",
        }
        with server_process("quire.cli.main", "serve", *options, **environment) as process:
            assert process.url
            yield process, receiver


def test_a_request_is_a_span_with_all_that_was_done_below_it(traced: tuple[ServerProcess, Receiver]) -> None:
    process, receiver = traced
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    asked = {**ASKED, "tools": [tool]}
    reply = httpx.post(f"{process.url}/v1/chat/completions", json=asked, headers=HEADERS | parent, timeout=60)
    assert reply.status_code == 200, reply.text
    assert wait_until(lambda: bool(receiver.named("llm_request")))
    assert wait_until(lambda: bool(receiver.named("parse")))
    [root] = receiver.named("llm_request")
    assert (root["trace"], root["parent"], root["kind"]) == (TRACE, PARENT, 2)
    assert reply.headers["traceparent"] == f"00-{TRACE}-{root['id']}-01"
    usage = reply.json()["usage"]
    told = root["attributes"]
    assert told["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.request.id"] == reply.json()["id"]
    assert told["gen_ai.request.temperature"] == 0.5
    for name in ("time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode", "e2e"):
        assert 0 <= told[f"gen_ai.latency.{name}"] <= told["gen_ai.latency.e2e"], name
    below = [span for span in receiver.spans if span["parent"] == root["id"]]
    names = [span["name"] for span in sorted(below, key=lambda span: span["start"])]
    assert {"tokenize", "queue", "prefill", "decode", "detokenize", "parse"} == set(names)
    chunks = sorted((span["attributes"]["quire.tokens.first"], span["attributes"]["quire.tokens.end"])
                    for span in below if span["name"] == "prefill")  # fmt: skip
    assert len(chunks) >= 2
    assert chunks[0][0] == 0
    assert chunks[-1][1] == usage["prompt_tokens"]
    assert [end for _, end in chunks[:-1]] == [first for first, _ in chunks[1:]]
    for span in below:
        assert root["start"] <= span["start"] <= span["end"] <= root["end"] + 0.001, span


@pytest.mark.parametrize("cores", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_a_killed_core_leaves_a_span_of_replay(cores: str) -> None:
    """By gRPC. Of two cores one goes on with what the other had; else all wait for the next engine."""
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "600"]
    with grpc_receiver() as receiver:
        options += ["--otlp-traces-endpoint", receiver.url, "--data-parallel-size", cores]
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
        with server_process("quire.cli.main", "serve", *options, **environment) as process:
            assert process.url
            asyncio.run(ask_and_kill(process))
            count = metrics(process)["quire:requests_replayed_total"]
            assert 1 <= count <= STREAMS
            assert wait_until(lambda: len(receiver.named("llm_request")) == STREAMS)
            assert wait_until(lambda: len(receiver.named("replay")) == count)
    roots = {span["id"]: span for span in receiver.named("llm_request")}
    decodes = {span["parent"]: span for span in receiver.named("decode")}
    for replay in receiver.named("replay"):
        root = roots[replay["parent"]]
        assert root["start"] <= replay["start"] <= replay["end"] <= root["end"]
        assert replay["start"] < decodes[root["id"]]["end"]  # the answer went on
        assert root["attributes"]["gen_ai.usage.completion_tokens"] == TOKENS
    assert len({replay["parent"] for replay in receiver.named("replay")}) == count  # one each


async def ask_and_kill(process: ServerProcess) -> None:
    """Streams, and kill -9 of a core once all of them have begun."""
    begun = 0

    async def stream(client: httpx.AsyncClient, number: int) -> None:
        nonlocal begun
        body = {"prompt": f"Question {number}", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        async with client.stream("POST", f"{process.url}/v1/completions", json=body) as response:
            is_first, is_done = True, False
            async for line in response.aiter_lines():
                begun += is_first and line.startswith("data: {")
                is_first = is_first and not line.startswith("data: {")
                is_done = is_done or line == "data: [DONE]"
                assert "error" not in line
            assert is_done

    async with httpx.AsyncClient(timeout=120) as client:
        streams = [asyncio.create_task(stream(client, number)) for number in range(STREAMS)]
        while begun < STREAMS:
            await asyncio.sleep(0.005)
        processes(process, CORE)[0].kill()
        await asyncio.gather(*streams)


@pytest.mark.parametrize(
    ("protocol", "missing"),
    [
        ("grpc", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"),
        ("http/protobuf", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
        ("grpc", "opentelemetry.sdk.resources"),
    ],
)
def test_without_the_extra_one_error_says_so(
    protocol: str, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is loaded."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setitem(sys.modules, missing, None)  # as it is where the extra is not
    assert main(["serve", "--device", "cpu", "--otlp-traces-endpoint", "http://127.0.0.1:4317"]) == 2
    said = capsys.readouterr().err
    assert "otlp_traces_endpoint" in said
    assert missing.removesuffix(".trace_exporter").removesuffix(".resources") in said
    assert "pip install 'quire[tracing]'" in said
    assert len(said.splitlines()) <= 15


def test_a_protocol_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="must be one of grpc, http/protobuf, got 'http/json'"):
        check("http://127.0.0.1:4317")


def test_a_caller_that_does_not_trace_is_obeyed(traced: tuple[ServerProcess, Receiver]) -> None:
    process, receiver = traced
    seen = len(receiver.named("llm_request"))
    headers = HEADERS | {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert httpx.post(f"{process.url}/v1/chat/completions", json=ASKED, headers=headers, timeout=60).status_code == 200
    bad = httpx.post(f"{process.url}/v1/chat/completions", json={"messages": 3}, headers=HEADERS, timeout=60)
    assert bad.status_code == 400
    assert wait_until(lambda: len(receiver.named("llm_request")) > seen)
    [failed] = receiver.named("llm_request")[seen:]  # that of the second, which nobody forbade
    assert failed["attributes"]["http.response.status_code"] == 400
    assert failed["trace"] != TRACE


def test_the_access_log_has_a_line_a_request(traced: tuple[ServerProcess, Receiver]) -> None:
    process, _ = traced
    headers = HEADERS | {"x-request-id": "mine-1"}
    reply = httpx.post(f"{process.url}/v1/chat/completions", json=ASKED, headers=headers, timeout=60)
    assert httpx.get(f"{process.url}/v1/models", headers={"x-request-id": "mine-2"}).status_code == 401

    def lines() -> dict[str, dict[str, object]]:
        read = [json.loads(line) for line in process.err if line.startswith("{")]
        return {str(line["id"]): line for line in read if line["logger"] == "quire.access"}

    assert wait_until(lambda: {"mine-1", "mine-2"} <= lines().keys())
    line, usage = lines()["mine-1"], reply.json()["usage"]
    assert (line["key"], line["route"], line["status"]) == ("ann", "/v1/chat/completions", 200)
    assert (line["prompt"], line["output"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert 0 <= line["queued"] <= line["first_token"] <= line["seconds"]  # type: ignore[operator]
    assert (lines()["mine-2"]["key"], lines()["mine-2"]["status"]) == ("-", 401)
    assert "story" not in "".join(process.err)


def test_the_start_is_told_to_the_hundredth(traced: tuple[ServerProcess, Receiver]) -> None:
    """What the parts of the line say is at least 98 % of the time since the process was started."""
    process, _ = traced
    [line] = [line for line in process.out if line.startswith("Started in ")]
    total, _, parts = line.removeprefix("Started in ").partition(" s: ")
    seconds = [float(part.rpartition(" ")[2]) for part in parts.split(", ")]
    assert sum(seconds) >= 0.98 * float(total) - 0.01 * len(seconds), line
    assert sum(seconds) <= float(total) + 0.01 * len(seconds)


def test_a_signal_asks_for_the_flight_record(traced: tuple[ServerProcess, Receiver]) -> None:
    process, _ = traced
    process.signal(signal.SIGUSR1)
    said = "the flight record is in "
    assert wait_until(lambda: any(said in line for line in process.err))
    line = json.loads(next(line for line in process.err if said in line))
    path = Path(line["message"].partition(said)[2])
    try:
        record = json.loads(path.read_text())
        assert record["cause"] == "SIGUSR1"
        assert record["look"]["steps"]
        assert any(each["route"] == "/v1/chat/completions" for each in record["details"]["http"])
    finally:
        path.unlink()
