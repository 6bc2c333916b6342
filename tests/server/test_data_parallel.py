"""`quire serve --data-parallel-size 2`: one server over two cores, of which one is killed under many streams."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.effort import WHOLE
from tests.server.process import ServerProcess, status_of, wait_until
from tests.server.several.test_front_ends import metrics
from tests.server.test_restarts import CORE, HI, KINDS, MODEL, ask_all, processes, requests, serve

GENERATED = "vllm:generation_tokens_total"


@pytest.fixture(scope="module")
def alone(demo_server: ServerProcess) -> list[dict[str, Any]]:
    """What one core answers."""
    return asyncio.run(ask_all(demo_server.url, KINDS if not WHOLE else 2 * KINDS))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two cores behind one front end: asked first, then killed."""
    options = ["--data-parallel-size", "2", "--server-dev-mode"]
    with serve(tmp_path_factory.mktemp("batches"), *options) as server:
        assert server.url
        yield server


def by_engine(server: ServerProcess, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=60).text)
    samples = [sample for family in families for sample in family.samples]
    return {sample.labels["engine"]: sample.value for sample in samples if sample.name == name}


async def kill_one_of(server: ServerProcess, victims: list[psutil.Process], count: int) -> list[dict[str, Any]]:
    """The answers, one core being killed amid them."""
    asked = asyncio.create_task(ask_all(server.url, count))
    while (await asyncio.to_thread(metrics, server))["vllm:num_requests_running"] < count // 2:
        await asyncio.sleep(0.02)
    random.choice(victims).kill()
    while len(processes(server, CORE)) == 2:
        await asyncio.sleep(0.01)
    assert await asyncio.to_thread(status_of, f"{server.url}/readyz") == 200  # the other one serves
    return await asked


def check_each_has_its_own(server: ServerProcess) -> None:
    """Histograms of requests and of steps; what no core can be blamed for is told of all."""
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "inter_token_latency_seconds"):
        counts = by_engine(server, f"vllm:{name}_count")
        assert counts.keys() == {"0", "1"}
        assert sum(counts.values()) > 0
    ended = by_engine(server, "vllm:request_success_total")  # the last reason of each: error
    assert ended == {"0": 0, "1": 0, "all": 0}
    steps, seen = by_engine(server, "quire:steps_total"), by_engine(server, "quire:step_seconds_count")
    assert all(0 <= seen[core] <= steps[core] for core in ("0", "1"))  # a killed core's last ones were not told
    assert by_engine(server, "vllm:cache_config_info") == {"0": 1.0, "1": 1.0}


def test_utilities_reach_every_core(pair: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": "one two three four " * 40, "max_tokens": 1, "temperature": 0}
    with httpx.Client(base_url=pair.url, timeout=60) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=body).status_code == 200
        assert metrics(pair)["vllm:prefix_cache_hits_total"] > 0  # near its prefix
        assert sum(by_engine(pair, GENERATED).values()) >= 3
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        hits = metrics(pair)["vllm:prefix_cache_hits_total"]
        assert client.post("/v1/completions", json=body).status_code == 200
        assert metrics(pair)["vllm:prefix_cache_hits_total"] == hits
        assert by_engine(pair, "vllm:engine_healthy") == {"0": 1.0, "1": 1.0}
        check_ranks(client, pair)
        check_looks(client)
        check_each_has_its_own(pair)
        for name in ("vllm:e2e_request_latency_seconds", "quire:step_seconds", "vllm:iteration_tokens_total"):
            assert min(by_engine(pair, f"{name}_count").values()) > 0
        steps, seen = by_engine(pair, "quire:steps_total"), by_engine(pair, "quire:step_seconds_count")
        assert all(0 <= steps[core] - seen[core] <= 1 for core in steps)  # the first is the server's own


def test_every_stream_outlives_its_core(pair: ServerProcess, alone: list[dict[str, Any]]) -> None:
    check_a_death(pair, alone)


@pytest.mark.long
def test_every_stream_of_two_front_ends_outlives_its_core(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    with serve(tmp_path, "--data-parallel-size", "2", "--api-server-count", "2") as server:
        assert server.url
        check_a_death(server, alone)


def check_a_death(server: ServerProcess, alone: list[dict[str, Any]]) -> None:
    found = asyncio.run(kill_one_of(server, processes(server, CORE), len(alone)))
    for (path, body), is_now, was in zip(requests(len(alone)), found, alone, strict=True):
        assert is_now == was, (path, body)
    assert wait_until(lambda: sum(by_engine(server, "vllm:engine_healthy").values()) == 2)
    assert wait_until(lambda: metrics(server)["vllm:num_requests_running"] == 0)
    assert sorted(by_engine(server, "quire:engine_restarts_total").values()) == [0, 1]
    assert metrics(server)["quire:requests_replayed_total"] >= 1
    check_each_has_its_own(server)
    before = by_engine(server, GENERATED)
    assert asyncio.run(ask_all(server.url, 9)) == alone[:9]  # the new one, too
    assert wait_until(lambda: all(now > before[c] + 20 for c, now in by_engine(server, GENERATED).items()))
    said = "".join(server.err)
    assert "Traceback" not in said, said
    assert status_of(f"{server.url}/health") == 200


def check_ranks(client: httpx.Client, server: ServerProcess) -> None:
    """X-data-parallel-rank, whichever API is asked."""
    asked = [
        ("/v1/completions", {"prompt": "one two three four " * 40, "max_tokens": 4, "n": 2}),
        ("/v1/completions", {"prompt": ["a b c", "d e f"], "max_tokens": 4, "stream": True}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 3, "n": 2, "use_beam_search": True}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 4}),
        ("/v1/messages", {"messages": HI, "max_tokens": 4}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4, "store": False}),
    ]
    for core in ("1", "0", "1"):
        for path, body in asked:
            assert wait_until(lambda: metrics(server)["vllm:num_requests_running"] == 0)
            before = by_engine(server, GENERATED)
            reply = client.post(path, json={"model": MODEL, **body}, headers={"X-data-parallel-rank": core})
            assert reply.status_code == 200, reply.text
            now = by_engine(server, GENERATED)
            assert {each for each in now if now[each] > before[each]} == {core}, (path, core)
    for wrong in ("2", "-1", "x", "1.0", "99999999999"):
        for path, body in (asked[0], asked[4]):
            reply = client.post(path, json={"model": MODEL, **body}, headers={"X-data-parallel-rank": wrong})
            assert reply.status_code == 400
            assert "X-data-parallel-rank must be the number of an engine core" in reply.json()["error"]["message"]
            assert reply.json()["error"].get("param", "X-data-parallel-rank") == "X-data-parallel-rank"


def check_looks(client: httpx.Client) -> None:
    """The dashboard's numbers of both cores, and the life of a request of the second."""
    client.get("/dashboard/state")
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 5, "request_id": "seen"}
    assert client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "1"}).status_code == 200

    def state() -> dict[str, Any]:
        told: dict[str, Any] = client.get("/dashboard/state").json()
        return told

    assert wait_until(lambda: any(one["id"] == "cmpl-seen" for one in state()["ended"]))
    told = state()
    assert [core["engine"] for core in told["cores"]] == [0, 1]
    assert all(core["steps"] and core["cells"]["num_blocks"] for core in told["cores"])
    assert len(told["stats"]["engines"]) == 2
    assert [one["engine"] for one in told["ended"] if one["id"] == "cmpl-seen"] == [1]
    again = client.get("/dashboard/state", params={"steps": told["until"]}).json()
    assert [core["steps"] for core in again["cores"]] == [[], []]
    life = client.get("/dashboard/requests/cmpl-seen").json()
    assert [event[1] for event in life["events"]] == ["seated", "chunk", "ended"]
    assert client.get("/dashboard/requests/cmpl-nobody").status_code == 404
